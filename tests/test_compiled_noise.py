"""The compiled engine's noise: distribution, independence, the same bits for every width."""

import hashlib
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

pytest.importorskip("numba", reason="the compiled engine needs the extra 'fast'")

from fl_privacy_lib.federated.compiled import gaussian

COUNT = 32 * 62_500  # two million


def stream(client, count=COUNT, round=0, seed=7):
    state, out = gaussian.initial_state(seed, round, client), np.zeros(count, np.float32)
    gaussian.add_normals(state, np.float32(1), out, 0, count)
    return out


def test_the_law_is_normal():
    """Kolmogorov–Smirnov at 1e-4; mean, variance, kurtosis within 5 standard errors."""
    z = stream(0).astype(np.float64)
    assert stats.kstest(z, "norm").pvalue > 1e-4
    assert abs(z.mean()) <= 5 / math.sqrt(COUNT)
    assert abs(z.var() - 1) <= 5 * math.sqrt(2 / COUNT)
    assert abs((z**4).mean() - 3) <= 5 * math.sqrt(96 / COUNT)


def test_the_tails_reach_five_sigma():
    """Counts beyond 1 … 5 on either side, of twenty million, within five standard errors."""
    z = np.concatenate([stream(client) for client in range(10)])
    for bound in (1, 2, 3, 4, 4.5, 5):
        expected = len(z) * stats.norm.sf(bound)
        for side in (z, -z):
            assert abs((side > bound).sum() - expected) <= 5 * math.sqrt(expected)
    assert np.isfinite(z).all() and np.abs(z).max() < 6.6  # √(2 · 31 ln 2)


@pytest.mark.parametrize(
    "other", [{"client": 1}, {"client": 0, "round": 1}, {"client": 0, "seed": 8}], ids=str
)
def test_clients_rounds_and_seeds_draw_independently(other):
    z, y = stream(0).astype(np.float64), stream(**other).astype(np.float64)
    for a, b in ((z, y), (z**2 - 1, y**2 - 1), (np.sign(z), np.sign(y))):
        assert abs((a * b).mean()) <= 5 * math.sqrt((a**2 * b**2).mean() / COUNT)


@pytest.mark.parametrize("lag", [1, 15, 16, 17, 32, 34_720])
def test_a_stream_is_independent_of_its_past(lag):
    """Within a draw, between its halves, between draws, between local iterations."""
    z = stream(0).astype(np.float64)
    for a, b in ((z[lag:], z[:-lag]), (z[lag:] ** 2 - 1, z[:-lag] ** 2 - 1)):
        assert abs((a * b).mean()) <= 5 * math.sqrt((a**2 * b**2).mean() / len(a))


def test_the_integers_are_xoshiro_s():
    """The kernel's state after two steps in each lane, against the published algorithm."""
    state = gaussian.initial_state(1, 2, 3)
    expected, out = [[int(w) for w in row] for row in state.T], np.zeros(32, np.float32)
    gaussian.add_normals(state, np.float32(1), out, 0, 32)
    for s in expected:
        for _ in range(2):
            t = s[1] << 9 & 0xFFFFFFFF
            s[2] ^= s[0]
            s[3] ^= s[1]
            s[1] ^= s[2]
            s[0] ^= s[3]
            s[2] ^= t
            s[3] = (s[3] << 11 | s[3] >> 21) & 0xFFFFFFFF
    assert np.array_equal(state.T, np.array(expected, np.uint32))


def test_the_normals_are_box_muller_s():
    """From the published generator's integers in double precision, up to float32's rounding."""
    state, out = gaussian.initial_state(1, 2, 3), np.zeros(32, np.float32)
    a, b, c, d = state.astype(np.uint64)
    u = (a + d) & 0xFFFFFFFF
    c, d = c ^ a, d ^ b
    b, a = b ^ c, a ^ d
    t = np.uint64(9)
    c = c ^ ((state[1].astype(np.uint64) << t) & 0xFFFFFFFF)
    d = ((d << np.uint64(11)) | (d >> np.uint64(21))) & 0xFFFFFFFF
    v = (a + d) & 0xFFFFFFFF
    gaussian.add_normals(state, np.float32(1), out, 0, 32)
    r = np.sqrt(-2 * np.log(((u >> np.uint64(1)) + 1) / 2**31))
    angle = ((v << np.uint64(2)) & 0xFFFFFFFF).astype(np.uint32).astype(np.int32) * (
        np.pi / 4 / 2**31
    )
    cosine = np.cos(angle) * np.where(v >> np.uint64(31), -1, 1)
    swapped = (v >> np.uint64(30)) & 1
    x, y = np.where(swapped, np.sin(angle), cosine), np.where(swapped, cosine, np.sin(angle))
    assert np.allclose(out, np.concatenate([r * x, r * y]), rtol=1e-5, atol=1e-6)


PINNED = "0026225447cff984"
SCRIPT = """
import sys, hashlib, numpy as np
sys.path.insert(0, {tests!r})
from fl_privacy_lib.federated.compiled import target
target.WIDTH = {width}
from test_compiled_noise import stream
print(hashlib.blake2b(stream(3, 32 * 1000).tobytes(), digest_size=8).hexdigest())
if {width} == 4 or {width} == 8:
    from compiled_scenes import agrees, plan_of, without_noise
    for name in ("mnist", "cifar10", "adult"):
        agrees(name, plan_of(1, batch_size=7, local_iterations=2), without_noise(0.1, "layer"))
"""


def test_the_stream_is_pinned():
    assert hashlib.blake2b(stream(3, 32 * 1000).tobytes(), digest_size=8).hexdigest() == PINNED


@pytest.mark.long
@pytest.mark.parametrize("width", [4, 8, 16])
def test_every_vector_width_has_the_same_stream_and_the_same_updates(width):
    """Width 4 is for ARM and CPUs without AVX2, width 8 for AVX2; LLVM splits wider vectors."""
    script = SCRIPT.format(tests=str(Path(__file__).parent), width=width)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.stdout.strip() == PINNED
