"""The sum of a shared parameter's gradients over its queries, among the ranks that have one of them.

Gradients are added along the tree of merger.assignment, in one process too, so the sum has the same bits on any number
of ranks. Each rank adds one part of every parameter and sends it to the others: with one partial sum a rank these are
the bytes of an all-reduce in a ring, of what is shared alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from gemel.merger.assignment import Node, climb, subtrees, sum_tree
from gemel.merger.distributed import CONFIG, ProcessGroup


class SharedGradients:
    """Takes the gradients of one query after the other, and puts their sums into the parameters in the end.

    `users` are the trained parameters of every query, `order` the queries in the order of the tree. A query without a
    gradient for a shared parameter counts as zero.
    """

    def __init__(self, group: ProcessGroup, users: Mapping[str, Iterable[nn.Parameter]], order: Sequence[str]) -> None:
        sharers, known = defaultdict[int, list[str]](list), dict[int, nn.Parameter]()
        for query in order:
            for p in users.get(query, ()):
                sharers[id(p)].append(query)
                known[id(p)] = p
        alike = defaultdict[tuple[object, ...], list[nn.Parameter]](list)
        for key, p in known.items():
            if len(sharers[key]) > 1:
                alike[tuple(sharers[key]), p.dtype].append(p)
        self._sums = [_SharedSum(group, queries, order, own) for (queries, _), own in alike.items()]  # type: ignore

    def take(self, query: str) -> None:
        """Take up the gradients of a query, which must be the only ones of its shared parameters."""
        for one in self._sums:
            if query in one.leaves:
                one.take(query)

    def finish(self) -> None:
        """Put the sums into the gradients, with those of other ranks."""
        for one in self._sums:
            one.finish()

    def clear(self) -> None:
        """Drop what was taken."""
        for one in self._sums:
            one.partial.clear()


class _SharedSum:
    """The sum of the gradients of parameters of one dtype that the same queries share.

    `partial` has the gradients of all parameters, added up over each subtree.
    """

    def __init__(
        self, group: ProcessGroup, queries: Sequence[str], order: Sequence[str], parameters: list[nn.Parameter]
    ) -> None:
        self._group, self.parameters = group, parameters
        self.leaves: dict[str, Node] = {query: (order.index(query),) for query in queries}
        self._members = tuple(place for (place,) in self.leaves.values())
        self._tree = sum_tree(self._members, 0, len(order))
        owned = defaultdict[int, list[int]](list)
        for query, (place,) in self.leaves.items():
            owned[group.owner(query)].append(place)
        self._nodes = {rank: subtrees(self._tree, own) for rank, own in sorted(owned.items())}
        self.partial = dict[Node, list[Tensor]]()

    def take(self, query: str) -> None:
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        for p in self.parameters:
            p.grad = None
        climb(self._tree, self.partial, self.leaves[query], grads, _add_all)

    def finish(self) -> None:
        if self._group.rank not in self._nodes:
            return
        if len(self._nodes) > 1:
            for bucket in self._buckets():
                self._exchange(bucket)
        for p, grad in zip(self.parameters, self.partial[self._nodes[self._group.rank][0]]):
            p.grad = grad
        self.partial.clear()

    def _buckets(self) -> Iterator[list[int]]:
        bucket, size = list[int](), 0
        for index, p in enumerate(self.parameters):
            bucket.append(index)
            size += p.nbytes
            if size >= CONFIG.bucket_bytes:
                yield bucket
                bucket, size = [], 0
        if bucket:
            yield bucket

    def _exchange(self, bucket: Sequence[int]) -> None:
        """Put the whole sums of some parameters into this rank's first partial sum.

        Of these numbers, one after the other, each rank adds an equal part.
        """
        ranks, own = list(self._nodes), self._group.rank
        flat = [torch.cat([self.partial[node][index].reshape(-1) for index in bucket]) for node in self._nodes[own]]
        parts = torch.stack(flat).tensor_split(len(ranks), dim=1)
        mine = parts[ranks.index(own)]
        rows = {rank: mine.new_empty(len(self._nodes[rank]), mine.shape[1]) for rank in ranks if rank != own}
        self._group.exchange({rank: part.contiguous() for rank, part in zip(ranks, parts) if rank != own}, rows)
        sums = dict[Node, Tensor]()
        for rank, values in {**rows, own: mine}.items():
            for node, value in zip(self._nodes[rank], values):
                climb(self._tree, sums, node, value, torch.add)
        total = sums[self._members].contiguous()
        totals = {rank: total.new_empty(part.shape[1]) for rank, part in zip(ranks, parts) if rank != own}
        self._group.exchange(dict.fromkeys(totals, total), totals)
        whole = torch.cat([total if rank == own else totals[rank] for rank in ranks])
        grads = [self.partial[self._nodes[own][0]][index] for index in bucket]
        for grad, part in zip(grads, whole.split([grad.numel() for grad in grads])):
            grad.copy_(part.view(grad.shape))


def _add_all(one: list[Tensor], other: list[Tensor]) -> list[Tensor]:
    torch._foreach_add_(one, other)  # type: ignore[attr-defined]
    return one
