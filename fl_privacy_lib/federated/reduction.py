"""A sum whose bits do not depend on who adds what: always along the same binary tree.

The tree stands over the blocks 0 … n − 1 of a round's participants and halves its range at every
node. A worker sums the nodes that lie wholly in its own run of blocks, and sends these few instead
of all its blocks.
"""

from collections.abc import Iterator

import torch

from fl_privacy_lib.defenses.clipping import Gradient

Reports = list[dict[str, torch.Tensor]]
Block = tuple[
    Gradient, Reports
]  # a weighted sum of updates in float64, and what each client reported
Node = tuple[int, int]  # the blocks from the first to before the second


def tree_sum(blocks: Iterator[Block], node: Node) -> Block:
    """Return the sum of the next blocks of a stream along the tree below a node; log₂ n sums are held at a time."""
    low, high = node
    if high - low == 1:
        return next(blocks)
    middle = (low + high) // 2
    return add(tree_sum(blocks, (low, middle)), tree_sum(blocks, (middle, high)))


def add(left: Block, right: Block) -> Block:
    """Return left + right, in the memory of the left one."""
    for name, total in left[0].items():
        total += right[0][name]
    return left[0], left[1] + right[1]


def nodes_within(low: int, high: int, node: Node) -> list[Node]:
    """Return the largest nodes of the tree below `node` that together make up the blocks low … high − 1.

    >>> nodes_within(0, 5, (0, 10)), nodes_within(5, 10, (0, 10)), nodes_within(3, 7, (0, 10))
    ([(0, 5)], [(5, 10)], [(3, 5), (5, 7)])
    """
    first, last = node
    if low <= first and last <= high:
        return [node]
    if last <= low or high <= first:
        return []
    middle = (first + last) // 2
    return nodes_within(low, high, (first, middle)) + nodes_within(low, high, (middle, last))


def joined(sums: dict[Node, Block], node: Node) -> Block:
    """Return the sum below a node from sums of nodes further down."""
    if node in sums:
        return sums[node]
    middle = (node[0] + node[1]) // 2
    return add(joined(sums, (node[0], middle)), joined(sums, (middle, node[1])))
