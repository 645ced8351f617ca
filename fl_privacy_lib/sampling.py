"""The sampling plan: who takes part in a round, and which examples each local iteration uses.

Training and accounting read the same plan, so they cannot disagree on how often an example is used.
Every draw is a function of the plan's seed and of what is drawn (round, client): the order in which
the draws are asked for changes nothing.
"""

import functools
from dataclasses import KW_ONLY, dataclass
from typing import Literal, get_args

import numpy as np

from fl_privacy_lib._checks import InputError, in_range, one_of, positive, refuse, whole_number

ClientSampling = Literal["fixed", "poisson", "one_pass"]
BatchSampling = Literal["one_pass_fixed", "one_pass_shuffled", "with_replacement", "poisson"]
LocalOptimizer = Literal["sgd", "momentum", "adam"]

# The streams of random numbers; each has its own, so that no two kinds of draw are ever correlated.
_PARTICIPANTS, _FIXED_ORDER, _BATCHES = 0, 1, 2


@dataclass(frozen=True)
class Plan:
    """How a federated training samples clients and examples.

    Parameters
    ----------
    clients : int
        K, the number of clients.
    participants : int
        K_t, clients in a round; under ``"poisson"`` their expected number.
    rounds : int
        T.
    local_iterations : int
        L, the batches that a client uses in one participation.
    batch_size : int
        B, examples in a batch; under ``"poisson"`` their expected number.
    client_sampling : {"fixed", "poisson", "one_pass"}
        ``fixed``: K_t different clients, uniformly. ``poisson``: each client with probability K_t /
        K, independently; a round may be empty, and an update counts 1/K_t in the aggregate all the
        same. ``one_pass``: each epoch of K // K_t rounds has a
        fresh order of all clients, cut into rounds of K_t; the K mod K_t at its end sit this epoch
        out.
    batch_sampling : {"one_pass_fixed", "one_pass_shuffled", "with_replacement", "poisson"}
        See the notes.
    local_lr, server_lr : float
        Learning rates of the client's iterations and of the server's step.
    local_optimizer : {"sgd", "momentum", "adam"}
        What takes a client's local steps, see `fl_privacy_lib.federated.local_steps`. Only under
        ``"sgd"`` is an update −η times a sum of gradients, which the attacks take it to be.
    weight_factor : float
        What the server multiplies the new weights with. Not 1 where it sums the K_t models and
        divides by another number than K_t: the released code of Fed-CDP has K_t − 1.
    seed : int
        0 to 2**63 - 1; the only source of randomness.

    Raises
    ------
    InputError
        If a number is out of range, participants exceed clients, or a sampling has an unknown name.

    Notes
    -----
    What each sampling means for *amplification*, the gain in privacy from an example's not being
    used for certain. It is a gain only against those who do not see who takes part.

    - Clients ``poisson``: the subsampled mechanism of rate q = K_t / K, once a round, for
      neighbours that differ by adding or removing. ``fixed``: the same rate, but sampling without
      replacement, which needs its own bound (neighbours that differ by replacing); the Poisson
      accountant does not cover it. ``one_pass``: each client takes part at most once an epoch, and
      nothing is gained against anyone who sees in which round.
    - Batches ``one_pass_fixed``: each client has one order for all rounds, and the batches follow
      it. An example is used at the same iteration whenever its client takes part. No amplification
      inside a participation: one use (or `uses_per_participation`) for each time its client takes
      part, and not L T events at a rate of B K_t / N. Counting T events at rate K_t / K is exact
      only where the client's other gradients do not betray that it takes part; where they do, the
      rate shrinks δ, not ε (`fl_privacy_lib.audit`).
    - ``one_pass_shuffled``: a fresh order in each round. The iteration that uses an example is
      secret, but exactly one does, so the iterations of a round depend on each other. Poisson
      accounting is an approximation here; what is counted for ``one_pass_fixed`` is a bound.
    - ``with_replacement``: each iteration draws B different examples from all that the client has,
      independently of the other iterations. Given that the client takes part, each iteration is
      sampling without replacement at rate B / n; an example may be used up to L times.
    - ``poisson``: as before, but each example by itself with probability B / n; batches vary in
      size and may be empty. Given that the client takes part, each iteration is the
      Poisson-subsampled mechanism of rate B / n. The L iterations of a participation all happen or
      none does, so L T events of rate (K_t / K)(B / n) are again an approximation.

    A client that holds one example several times (`fl_privacy_lib.data.Partition.kinds`) uses it
    that many times more often, and each of its holders adds its own participations.

    Examples
    --------
    >>> plan = Plan(10, participants=3, rounds=2, local_iterations=2, batch_size=2, local_lr=0.1)
    >>> len(plan.participants_of(0)), [len(batch) for batch in plan.batches(7, 5, 0)]
    (3, [2, 2])
    >>> plan.client_rate, plan.uses_per_participation(5)
    (0.3, 1)
    """

    clients: int
    participants: int
    rounds: int
    local_iterations: int
    batch_size: int
    client_sampling: ClientSampling = "fixed"
    batch_sampling: BatchSampling = "one_pass_fixed"
    _: KW_ONLY
    local_lr: float
    server_lr: float = 1.0
    local_optimizer: LocalOptimizer = "sgd"
    weight_factor: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        counts = ("clients", "participants", "rounds", "local_iterations", "batch_size")
        whole_number(1, **{name: getattr(self, name) for name in counts})
        whole_number(0, seed=self.seed)
        refuse(
            {
                f"participants = {self.participants} is more than clients = {self.clients}: "
                f"choose at most {self.clients}.": self.participants > self.clients,
                f"seed = {self.seed} is too large: choose an integer below 2**63.": (
                    self.seed >= 2**63
                ),
            }
        )
        one_of(get_args(ClientSampling), client_sampling=self.client_sampling)
        one_of(get_args(BatchSampling), batch_sampling=self.batch_sampling)
        one_of(get_args(LocalOptimizer), local_optimizer=self.local_optimizer)
        positive(local_lr=self.local_lr, server_lr=self.server_lr, weight_factor=self.weight_factor)

    @property
    def client_rate(self) -> float:
        """Probability that a client takes part in a round, K_t / K."""
        return self.participants / self.clients

    def participants_of(self, round: int) -> np.ndarray:
        """Return the clients of a round, sorted, [K_t]; under ``"poisson"`` of any length.

        Parameters
        ----------
        round : int
            0 to T - 1.

        Raises
        ------
        InputError
            If there is no such round.
        """
        whole_number(0, round=round)
        in_range(0, self.rounds - 1, round=round)
        if self.client_sampling == "one_pass":
            epoch, place = divmod(round, self.clients // self.participants)
            order = _order(self.seed, epoch, self.clients)
            return np.sort(order[place * self.participants : (place + 1) * self.participants])
        rng = _generator(self.seed, _PARTICIPANTS, round)
        if self.client_sampling == "poisson":
            return np.flatnonzero(rng.random(self.clients) < self.client_rate)
        return np.sort(rng.choice(self.clients, self.participants, replace=False))

    def batches(self, client: int, client_size: int, round: int) -> list[np.ndarray]:
        """Return the examples of a client's participation, one array for each local iteration.

        Parameters
        ----------
        client : int
            0 to K - 1.
        client_size : int
            n, the number of its examples, at least B.
        round : int
            0 to T - 1.

        Returns
        -------
        list of ndarray of int64
            L arrays of positions 0 to n - 1 among the client's examples. Each has B entries, all
            different; under ``"poisson"`` any number of entries. A pass that comes to its end
            begins again in the same order, so no batch is short; if L B < n, the examples after the
            first L B of the order are left out (under ``"one_pass_fixed"`` the same ones in every
            round).

        Raises
        ------
        InputError
            If there is no such client or round, or a batch is larger than n.
        """
        whole_number(0, client=client, round=round)
        in_range(0, self.clients - 1, client=client)
        in_range(0, self.rounds - 1, round=round)
        self._check_holds_a_batch(client_size)
        count, size = self.local_iterations, self.batch_size
        fixed = self.batch_sampling == "one_pass_fixed"
        rng = _generator(
            self.seed, *((_FIXED_ORDER, client) if fixed else (_BATCHES, round, client))
        )
        if self.batch_sampling == "poisson":
            return [np.flatnonzero(rng.random(client_size) < size / client_size)
                    for _ in range(count)]  # fmt: skip
        if self.batch_sampling == "with_replacement":
            return [rng.choice(client_size, size, replace=False) for _ in range(count)]
        order = rng.permutation(client_size)
        return list(order[np.arange(count * size) % client_size].reshape(count, size))

    def uses_per_participation(self, client_size: int) -> int:
        """Return how often, at most, one of n examples is used in one participation.

        ceil(L B / n) for a pass (1 unless it begins again), L for the samplings that draw each
        batch anew.

        Raises
        ------
        InputError
            If a batch is larger than n.

        Examples
        --------
        >>> paper = Plan(1000, 100, 100, 100, 5, local_lr=0.05)
        >>> paper.uses_per_participation(500), paper.uses_per_participation(300)
        (1, 2)
        """
        self._check_holds_a_batch(client_size)
        if self.batch_sampling in ("with_replacement", "poisson"):
            return self.local_iterations
        return -(-self.local_iterations * self.batch_size // client_size)

    def _check_holds_a_batch(self, client_size: int) -> None:
        """Raise `InputError` if a client of this size has fewer examples than a batch."""
        whole_number(1, client_size=client_size)
        if self.batch_size > client_size:
            raise InputError(
                f"batch_size = {self.batch_size} is more than the client's {client_size} examples: "
                "choose a smaller batch_size, or give each client more examples."
            )


def _generator(seed: int, *key: int) -> np.random.Generator:
    """Return the generator of one draw, which depends on the seed and the key only."""
    # A spawn key keeps seed and key apart: as one list, a large seed could run into the round.
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))


@functools.lru_cache(maxsize=4)  # all rounds of an epoch cut the same order
def _order(seed: int, epoch: int, clients: int) -> np.ndarray:
    return _generator(seed, _PARTICIPANTS, epoch).permutation(clients)
