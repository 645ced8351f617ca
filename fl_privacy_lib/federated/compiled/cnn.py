"""The kernel of the papers' CNN: a client's local iterations, or a part of one.

The batch goes through in slices of `SLICE` examples, and everything between two of them is written over, so the memory
does not depend on the batch's size. What the CNN's layers do is in `convolutions`; its dense layer is here. Its weights
lie as [class][tile][channel], and its gradients are never formed one by one: that of an example is the outer product
of the logits' gradient g and the features a, so its norm is ‖g‖ ‖a‖.
"""

import math
from collections import namedtuple

from fl_privacy_lib.federated.compiled.convolutions import (
    FIRST,
    OUTPUT_ROWS,
    PART,
    SECOND,
    SQUARE,
    TILE_ROWS,
    WEIGHTS,
    first_forward,
    first_gradient,
    listed,
    middle_gradient,
    second_forward,
    second_gradient,
    transformed_weights,
)
from fl_privacy_lib.federated.compiled.steps import (
    ADD,
    BEGIN,
    CLASSIFY,
    FACTORS,
    MEASURE,
    NONE,
    STEP,
    clear,
    clip,
    combine,
    dot,
    score,
    softmax,
    step,
)
from fl_privacy_lib.federated.compiled.target import entry, inner
from fl_privacy_lib.federated.compiled.vectors import after, codes, floats, ints, longs

SLICE = 6  # examples: their gradients of the second weights fill half of a 1 MiB L2 cache
TENSORS = 3


Work = namedtuple("Work", "middle middle_marks features feature_marks transformed tiles outputs feature_gradient "
                  "middle_gradient first second tile_values tile_channels tile_counts channel_factors channel_patches "
                  "channel_counts")  # fmt: skip
"""The addresses of the CNN's memory between its layers; see `sizes`."""


def sizes(channels: int, size: int) -> Work:
    """Return how many bytes each memory takes, for C channels and S×S middle positions."""
    tiles, middle = ((size - 2) // 2) ** 2, size * size * FIRST
    slots, room = 4 * tiles * 5 * SECOND, 4 * SLICE * tiles * SECOND
    return Work(
        middle=4 * SLICE * middle, middle_marks=SLICE * middle,
        features=4 * SLICE * tiles * SECOND, feature_marks=SLICE * tiles * SECOND,
        transformed=4 * 16 * WEIGHTS, tiles=4 * max(16 * TILE_ROWS, 9 * SQUARE), outputs=4 * 16 * OUTPUT_ROWS,
        feature_gradient=4 * tiles * SECOND, middle_gradient=4 * middle,
        first=4 * SLICE * channels * 9 * FIRST, second=4 * SLICE * 2 * PART,
        tile_values=slots, tile_channels=slots, tile_counts=8 * tiles,
        channel_factors=room, channel_patches=room, channel_counts=4 * SECOND,
    )  # fmt: skip


@inner
def forward(m, w, channels, side, size, classes, first, count):
    """Run a slice of a batch, which begins at place `first` of all positions, up to its logits."""
    x, positions, weights, logits = floats(m.x), longs(m.positions), floats(m.weights), floats(m.logits)
    middle, marks, features = floats(w.middle), codes(w.middle_marks), floats(w.features)
    for b in range(count):
        image, place = after(x, positions[first + b] * channels * side * side), b * size * size * FIRST
        first_forward(image, channels, side, weights, size, after(middle, place), after(marks, place))
    second_forward(middle, count, size, floats(w.transformed), floats(w.tiles), floats(w.outputs), features,
                   codes(w.feature_marks))  # fmt: skip
    width, dense = ((size - 2) // 2) ** 2 * SECOND, channels * 9 * FIRST + 2 * PART
    for b in range(count):
        for k in range(classes):
            logits[b * classes + k] = dot(features, b * width, weights, dense + k * width, width)


@inner
def measure(m, w, channels, side, size, classes, first, done, count, apart):
    """Form the gradients of a slice of which `forward` has run, and their norms.

    apart : whether every example has one of its own; otherwise one of all is formed, and no norm
    """
    x, y, positions, weights = floats(m.x), longs(m.y), longs(m.positions), floats(m.weights)
    logits, norms, middle, features = floats(m.logits), floats(m.norms), floats(w.middle), floats(w.features)
    by_tile = floats(w.tile_values), ints(w.tile_channels), longs(w.tile_counts)
    by_channel = floats(w.channel_factors), ints(w.channel_patches), ints(w.channel_counts)
    small, large = channels * 9 * FIRST, 2 * PART
    tiles = ((size - 2) // 2) ** 2
    width, room, gradient, back = tiles * SECOND, SLICE * tiles, floats(w.feature_gradient), floats(w.middle_gradient)
    square = 0.0
    for b in range(count):
        example, g = positions[first + b], after(logits, b * classes)
        length = softmax(g, y[example], classes)
        clear(gradient, width)
        combine(gradient, g, 1, after(weights, small + large), width, classes, width)
        group = b if apart else 0
        one, two = after(floats(w.first), group * small), after(floats(w.second), group * large)
        if apart or b == 0:
            clear(one, small)
            for co in range(SECOND):
                by_channel[2][co] = 0
        base = b * size * size * FIRST
        listed(gradient, after(codes(w.feature_marks), b * width), size, base, by_tile, by_channel, room)
        if apart or b == count - 1:
            square = second_gradient(middle, size, by_channel, room, two)
        middle_gradient(after(weights, small), size, by_tile, back)
        image = after(x, example * channels * side * side)
        first_gradient(image, channels, side, back, after(codes(w.middle_marks), base), size, one)
        if apart:
            place = (done + b) * TENSORS
            norms[place] = math.sqrt(dot(one, 0, one, 0, small))
            norms[place + 1] = math.sqrt(square)
            norms[place + 2] = length * math.sqrt(dot(features, b * width, features, b * width, width))


@inner
def add(m, w, channels, size, classes, done, count, apart):
    """Add a slice's gradients, each times its factor, to the sums."""
    sums, factors, logits = floats(m.sums), after(floats(m.factors), done * TENSORS), floats(m.logits)
    small, large, rows = channels * 9 * FIRST, 2 * PART, count if apart else 1
    width = ((size - 2) // 2) ** 2 * SECOND
    combine(sums, factors, TENSORS, floats(w.first), small, rows, small)
    combine(after(sums, small), after(factors, 1), TENSORS, floats(w.second), large, rows, large)
    for b in range(count):
        for k in range(classes):
            logits[b * classes + k] *= factors[b * TENSORS + 2]
    for k in range(classes):
        dense = after(sums, small + large + k * width)
        combine(dense, after(logits, k), classes, floats(w.features), width, count, width)


@entry
def run(shape, memory, work, iterations, phases, scope, rate, batch_size):
    """Run the phases (a sum of those of `steps`) of some local iterations.

    Parameters
    ----------
    shape : (channels, side, S, classes)
    memory, work : addresses
    scope : NONE forms no gradient of a single example; otherwise LAYER or ALL
    rate, batch_size : what a step is multiplied with and divided by
    """
    channels, side, size, classes = shape
    m, w, apart = memory, work, scope != NONE
    ends, begins = longs(m.ends), longs(m.tensors)
    for iteration in range(iterations):
        if phases & BEGIN:
            second = after(floats(m.weights), channels * 9 * FIRST)
            transformed_weights(second, floats(w.tiles), floats(w.transformed))
            clear(floats(m.sums), begins[TENSORS])
        for first in range(ends[iteration], ends[iteration + 1], SLICE):
            done, count = first - ends[iteration], min(SLICE, ends[iteration + 1] - first)
            if phases & (MEASURE | CLASSIFY):
                forward(m, w, channels, side, size, classes, first, count)
            if phases & CLASSIFY:
                score(m, first, count, classes)
            if phases & MEASURE:
                measure(m, w, channels, side, size, classes, first, done, count, apart)
            if phases & FACTORS:
                clip(m, done, count, TENSORS, scope)
            if phases & ADD:
                add(m, w, channels, size, classes, done, count, apart)
        if phases & STEP:
            step(m, TENSORS, rate, batch_size)
