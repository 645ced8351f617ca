"""A sum whose bits do not depend on who adds what: always along the same binary tree.

The tree stands over the blocks 0 … n − 1 of a round's participants and halves its range at every
node. A worker sums the nodes that lie wholly in its own run of blocks, and sends these few instead
of all its blocks.
"""

from collections.abc import Iterator, Mapping

import torch

from fl_privacy_lib.defenses.clipping import Gradient

Reports = list[dict[str, torch.Tensor]]
Block = tuple[Gradient, Reports]  # a weighted sum of updates, float64; what each client reported
Node = tuple[int, int]  # the blocks from the first to before the second


def tree_sum(node: Node, sums: Mapping[Node, Block], blocks: Iterator[Block]) -> Block:
    """Return the sum below a node of the tree; log₂ n sums are held at a time.

    Parameters
    ----------
    sums : what is known of nodes further down
    blocks : a stream of the blocks below the node, for what is not
    """
    first, last = node
    if node in sums:
        return sums[node]
    if last - first == 1:
        return next(blocks)
    middle = (first + last) // 2
    total, reports = tree_sum((first, middle), sums, blocks)
    right, right_reports = tree_sum((middle, last), sums, blocks)
    for name, value in right.items():
        total[name] += value
    return total, reports + right_reports


def nodes_within(low: int, high: int, node: Node) -> list[Node]:
    """Return the largest nodes below `node` that together make up the blocks low … high − 1.

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
