"""The scattering transform against a naive one, Kymatio's numbers and its laws."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_privacy_lib.data.decoders import decode_features
from fl_privacy_lib.data.scattering import features, scattering
from fl_privacy_lib.data.specs import DATASETS

PLACE = torch.arange(32.0)
WAVES = (0.5 + 0.5 * torch.sin(0.7 * PLACE)[:, None] * torch.cos(0.3 * PLACE))[None, None]


@pytest.mark.parametrize(
    ("channel", "row", "column", "kymatio"),
    [
        (0, 0, 0, 0.75391), (0, 3, 5, 0.69530), (1, 2, 2, 0.01755), (4, 4, 4, 0.02142),
        (6, 7, 1, 0.02734), (9, 0, 3, 0.02807), (13, 4, 4, 0.08287), (17, 2, 6, 0.00010),
        (40, 5, 5, 0.00405), (80, 1, 1, 0.00129),
    ],
)  # fmt: skip
def test_it_is_kymatios(channel, row, column, kymatio):
    # Scattering2D(J=2, shape=(32, 32), L=8) of Kymatio 0.3.0, on this image
    assert float(scattering(WAVES)[0, 0, channel, row, column]) == pytest.approx(kymatio, abs=1e-4)


def naive_filter(side, width, angle, slant, frequency):
    """Return a wavelet on a torus of that side, or the Gaussian, summed over its copies."""
    wave, envelope = np.zeros((side, side), complex), np.zeros((side, side))
    for down in range(-2 * side, 2 * side):
        for right in range(-2 * side, 2 * side):
            along = down * np.cos(angle) + right * np.sin(angle)
            across = right * np.cos(angle) - down * np.sin(angle)
            bump = np.exp(-(along**2 + slant**2 * across**2) / (2 * width**2))
            envelope[down % side, right % side] += bump * slant / (2 * np.pi * width**2)
            wave[down % side, right % side] += (
                bump * slant / (2 * np.pi * width**2) * np.exp(1j * frequency * along)
            )
    return wave - envelope * wave.sum() / envelope.sum() if frequency else envelope


def naive_convolution(image, kernel):
    """Return the circular convolution, offset by offset."""
    side = len(image)
    return sum(
        kernel[down, right] * np.roll(image, (down, right), (0, 1))
        for down in range(side)
        for right in range(side)
    )


def test_it_is_wavelets_moduli_and_local_means():
    image = torch.rand(1, 1, 16, 16, generator=torch.Generator().manual_seed(5))
    padded = np.pad(image[0, 0].double().numpy(), 4, mode="reflect")  # 24 × 24
    angles = [np.pi * (3 - k) / 8 for k in range(8)]
    low = naive_filter(24, 1.6, 0.0, 1.0, 0.0)

    def mean(signal):
        return naive_convolution(signal, low).real[4:-4:4, 4:-4:4]

    def band(signal, scale, angle):
        kernel = naive_filter(24, 0.8 * 2**scale, angles[angle], 0.5, 0.75 * np.pi / 2**scale)
        return np.abs(naive_convolution(signal, kernel))

    found = scattering(image)[0, 0].numpy()
    fine = band(padded, 0, 2)
    expected = {0: mean(padded), 1 + 2: mean(fine), 1 + 8 + 5: mean(band(padded, 1, 5)),
                17 + 2 * 8 + 6: mean(band(fine, 1, 6))}  # fmt: skip
    for channel, values in expected.items():  # it drops rows and columns on the way: aliasing
        np.testing.assert_allclose(found[channel], values, rtol=0.03, atol=2e-4)


@settings(max_examples=10, deadline=None)
@given(st.floats(-3, 3), st.floats(0.1, 4), st.integers(0, 99))
def test_wavelets_see_no_constant_and_no_sign(shift, factor, seed):
    image = torch.rand(1, 1, 16, 16, generator=torch.Generator().manual_seed(seed))
    base, moved = scattering(image), scattering(shift - factor * image)
    torch.testing.assert_close(moved[:, :, 0], shift - factor * base[:, :, 0], rtol=0, atol=2e-5)
    torch.testing.assert_close(moved[:, :, 1:], factor * base[:, :, 1:], rtol=0, atol=2e-5)
    assert float(base[:, :, 1:].min()) > -1e-6


IMAGES = np.random.default_rng(3).integers(0, 256, (5, 32, 32, 3), dtype=np.uint8)


def test_an_examples_features_are_its_own_and_normalised():
    together = features(IMAGES)
    assert together.shape == (5, 243 * 16) and together.dtype == np.float32
    for i in range(5):
        np.testing.assert_allclose(features(IMAGES[i : i + 1])[0], together[i], atol=2e-4)
    pixels = torch.from_numpy(IMAGES[:1].transpose(0, 3, 1, 2).astype(np.float32)) / 255
    places = scattering(pixels)[0].reshape(27, 9, 4, 2, 4, 2).double().mean((3, 5)).numpy()
    mean, var = places.mean((1, 2, 3), keepdims=True), places.var((1, 2, 3), keepdims=True)
    expected = (places - mean) / np.sqrt(var + 1e-5)
    np.testing.assert_allclose(together[0], expected.ravel(), atol=2e-4)


def test_the_data_set_has_features_in_place_of_images():
    spec = DATASETS["cifar10"]
    arrays = {"train_images": IMAGES, "train_labels": np.arange(5), "test_images": IMAGES[:2],
              "test_labels": np.arange(2)}  # fmt: skip
    decoded = decode_features([], images=lambda paths: dict(arrays))
    np.testing.assert_array_equal(decoded["train_images"], features(IMAGES))
    np.testing.assert_array_equal(decoded["test_labels"], np.arange(2))
    twin = DATASETS["cifar10_scattering"]
    assert [layout.files for layout in twin.layouts] == [layout.files for layout in spec.layouts]
    assert [layout.decode.keywords["images"] for layout in twin.layouts] == [
        layout.decode for layout in spec.layouts
    ]
    assert twin.kind == "tabular"
