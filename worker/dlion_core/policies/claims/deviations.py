"""Which peer's contributions deviate from those of the others: wrong, but of a plausible size.

Called by the policies that combine the contributions of all workers at once, with each round's.
Each contribution is reduced to a sketch, a random projection to a few hundred values, and its norm.
Nothing is sent and no contribution is changed: the result is a text for a warning, once per peer
and cause. The bounds are wide, since a warning about an honest worker is worth less than none.

- **large**: its norm is far above the largest that any other worker ever had. Here and below, of
  workers with like data at three sites or more, only those of other sites count (`independent`).
- **opposed**: it points away from workers of like data, which agree with each other.
- **one-sided**: far more of its entries than of any other worker's have the same sign.
- **lasting**: it differs from workers of like data in one direction (`lasting_differences`).
- **repeated**: it is what the same peer sent long ago, while those of others change.
- **empty**: it claims samples and has no entry, while others have.

Directions are compared with each other worker, and a middle one counts. A sum of all others would
let a bad worker make an honest one seem opposed. Workers of other data may honestly point the
opposite way: where two sites balance, their contributions are opposite. So only workers whose data
are alike by the manifest are compared (`groups_of_like_data`).

Directions, signs and lasting differences are summed over rounds (`cumulative_sums`). A large
deviation is named in its second or third round, a small one once it has lasted.

Source: this project. The sketch is a count sketch (Charikar, Chen & Farach-Colton, 2002) with one
sign for each row of entries. Shape suffixes: D entries, R rows, S values of a sketch, P workers.
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from dlion_api.names import Rank
from dlion_api.spec import Spec
from dlion_core.codecs.norms import squared_norm_of
from dlion_core.policies.aggregation import Contribution
from dlion_core.policies.claims.cumulative_sums import CumulativeSums
from dlion_core.policies.claims.independent import largest_elsewhere, units_of
from dlion_core.policies.claims.lasting_differences import LastingDifferences
from dlion_core.policies.claims.sent_entries import SentEntries, Values
from dlion_core.policies.claims.sign_balance import sign_balance
from dlion_core.policies.context import PolicyContext

SKETCH_VALUES = 509
"""A prime, so that no dimension of a layer's shape is a multiple of it."""

MIN_WORKERS = 3
"""Minimum workers: of two, either may be wrong."""

WINDOW, MIN_ROUNDS = 16, 8
"""Measured rounds after which a contribution is compared with the same peer's, and the fewest
comparisons of which the middle one counts."""

GRADIENT_EVERY = 4
"""After the first `WINDOW`, one of this many gradients is measured: there is one in each step, and
1 M entries of four workers take some 2 ms."""

LARGE_RATIO, LARGE_ROUNDS = 5.0, 2
"""Maximum ratio of a norm to the largest of any other worker so far, and the rounds for which it is
exceeded. Clean runs of unequal workers with skewed data reached 2.1."""

LIMIT = 1.0
"""Limit of the sums over rounds. One round alone adds less to each of them."""

OPPOSITION = 0.1
"""Above it, what a contribution opposes adds to the sum. Clean runs came to sums of 0.4, where
they had learned all, too."""

ONE_SIDED_EXCESS = 0.25
"""Above it, the excess of a sign balance over the largest of all others adds to the sum. Clean runs
came to sums of 0.3."""

LASTING_EXCESS = 0.1
"""Above it, what `LastingDifferences` returns adds to the sum. Clean runs of 250 steps came to sums
of 0.3."""

LITTLE_LEFT = 0.05
"""Part of the middle of the workers' largest norms. Smaller contributions add nothing to the sums
of their signs and differences, and do not count as repeated: once all is learned, or the learning
rate has fallen, a worker's own samples and what its links kept back set it apart. At 0.01 clean
runs on machines of changing speed named honest workers (docs/robustness.md)."""

LIKE_COUNT = 1.25
"""Maximum ratio of the entries of a contribution and those of the middle one, or the reverse, for
a comparison of lasting differences where links drop entries."""

REPEATED_COSINE, CHANGING_COSINE = 0.99, 0.9
"""Cosine of a contribution to the same peer's of `WINDOW` rounds ago, and the same for most other
peers."""

EMPTY_ROUNDS, EMPTY_STEPS, EMPTY_SAVING_STEPS = 16, 64, 1024
"""Successive empty rounds: under policies with local steps, under others, and under those that save
up the budget of a slow link until a whole message fits."""

_IN_ROUNDS = frozenset({"adaptive", "sparseloco"})
_SAVING = frozenset({"dlion", "dlion-published"})

_OF_A_WORKER = ("{group}", "{index}", "{rank}")
"""Placeholders of a path that differ within a site."""


def groups_of_like_data(context: PolicyContext) -> list[frozenset[Rank]]:
    """Return the groups of workers whose samples are drawn alike, by the manifest.

    All workers for a data set by name that is partitioned uniformly; those of each site if whole
    classes go to sites, or if each site reads separate files. None for other data.
    """
    data = context.spec.trainer.dataset
    is_own = data.path is not None and any(one in data.path for one in _OF_A_WORKER)
    is_known = data.name is not None or data.path is not None
    if not is_known or is_own or data.watch or data.partition == "dirichlet":
        return []
    if data.name is not None and data.partition == "iid":
        return [frozenset(context.ranks)]
    members = defaultdict(set)
    for rank, site in context.sites.items():
        members[site].add(rank)
    return [frozenset(ranks) for _, ranks in sorted(members.items())]


def _longest_silence(spec: Spec) -> int:
    """Return the rounds without an entry from which on a peer is named."""
    if spec.exchange.policy in _IN_ROUNDS:
        return EMPTY_ROUNDS
    if spec.exchange.propagation == "selective":
        return max(EMPTY_STEPS, 2 * spec.exchange.propagation_within)
    return EMPTY_SAVING_STEPS if spec.exchange.policy in _SAVING else EMPTY_STEPS


def _adds_up(spec: Spec) -> bool:
    """Return whether what a link does not carry may be added to later contributions."""
    return spec.exchange.policy in {"ako", "topk"} or spec.exchange.residual != "none"


def _drops(spec: Spec) -> bool:
    """Return whether what a link does not carry is lost."""
    return spec.exchange.policy in _SAVING and spec.exchange.residual == "none"


@dataclass(frozen=True)
class _Size:
    """How large a contribution is."""

    norm: float
    comparable: float
    """The norm that it would have with one sample, and all entries in each step: noise falls with
    the root of a batch, and what a slow link keeps back adds up."""


class DeviationDetector:
    """What one worker knows of the contributions of all, itself included."""

    def __init__(self, context: PolicyContext) -> None:
        self._own, self._size = context.rank, context.layout.size
        self._groups, self._sites = groups_of_like_data(context), context.sites
        self._empty_rounds = _longest_silence(context.spec)
        self._every = 1 if context.spec.exchange.policy in _IN_ROUNDS else GRADIENT_EVERY
        self._leaves_out = context.spec.exchange.robustness in {"trimmed", "krum"}
        """Whether what few workers know is not learned, so that their gradients honestly grow."""
        rows = -(-self._size // SKETCH_VALUES)
        seed = (context.spec.trainer.seed, context.rank, context.secret)
        self._rng = np.random.default_rng(seed)
        self._sign_R = self._rng.choice(np.array([-1, 1], np.float32), rows)
        self._rounds = self._next_measured = 0
        self._adds_up, self._drops = _adds_up(context.spec), _drops(context.spec)
        self._largest: dict[Rank, _Size] = {}
        """The largest of each worker so far."""
        self._silent: Counter[Rank] = Counter()
        """Rounds since a worker's last contribution with entries."""
        self._large: Counter[Rank] = Counter()
        self._empty: Counter[Rank] = Counter()
        self._opposition = CumulativeSums(OPPOSITION)
        self._one_sidedness = CumulativeSums(ONE_SIDED_EXCESS)
        self._lasting = LastingDifferences(
            self._groups, self._size, np.random.default_rng((*seed, 1)), self._sites
        )
        self._lasting_excess = CumulativeSums(LASTING_EXCESS)
        self._repeats = _windows()
        """For each worker the cosines to its own contribution of `WINDOW` rounds ago."""
        self._earlier: defaultdict[Rank, deque[NDArray[np.float32]]] = defaultdict(
            lambda: deque(maxlen=WINDOW)
        )
        """The last directions of each worker, the oldest first."""
        self._reported: set[tuple[Rank, str]] = set()

    def forget(self, rank: Rank) -> None:
        """Drop the directions of a worker that left: it may return with other weights."""
        self._opposition.forget(rank)
        self._one_sidedness.forget(rank)
        self._lasting.forget(rank)
        self._lasting_excess.forget(rank)
        self._repeats.pop(rank, None)
        self._earlier.pop(rank, None)
        del self._empty[rank], self._silent[rank]

    def detect(self, contributions: Mapping[Rank, Contribution]) -> list[str]:
        """Return what deviates in this round, `worker 2 ...`, for each peer and cause once."""
        if len(contributions) < MIN_WORKERS:
            return []
        found = self._find_empty(contributions)
        if self._rounds % self._every == 0:  # others must not know which round is measured
            self._next_measured = self._rounds + int(self._rng.integers(self._every))
        if self._rounds < WINDOW or self._rounds == self._next_measured:
            found += self._measure(contributions)
        for rank, one in contributions.items():
            self._silent[rank] = self._silent[rank] + 1 if one.part is None else 0
        self._rounds += 1
        texts = []
        for rank, cause, text in found:
            if rank != self._own and (rank, cause) not in self._reported:
                self._reported.add((rank, cause))
                texts.append(f"worker {rank} {text}")
        return texts

    def _measure(self, contributions: Mapping[Rank, Contribution]) -> list[tuple[Rank, str, str]]:
        sizes: dict[Rank, _Size] = {}
        unit_of: dict[Rank, NDArray[np.float32]] = {}
        balance_of: dict[Rank, float] = {}
        taken_of: dict[Rank, NDArray[np.float32]] = {}
        first_block = int(self._rng.integers(2**31))  # the same entries of all contributions
        for rank, one in contributions.items():
            if one.part is None:
                continue
            sent = SentEntries.of(one.part)
            sketch_S = np.zeros(SKETCH_VALUES, np.float32)
            # The norm is that of all entries: what a sketch keeps of a contribution that was made
            # to vanish in it is too little.
            norm = math.sqrt(sent.project(self._sign_R, sketch_S))
            comparable = norm * math.sqrt(one.samples)
            if self._adds_up:
                comparable *= math.sqrt(one.part.coded_K.size / self._size)
                comparable /= self._silent[rank] + 1
            sizes[rank] = _Size(norm, comparable)
            length = math.sqrt(squared_norm_of(sketch_S))
            if 0 < length < np.inf:
                unit_of[rank] = sketch_S / np.float32(length)
            balance = sign_balance(sent, first_block)
            if balance is not None:
                balance_of[rank] = balance
            taken_of[rank] = self._lasting.taken(sent)
        found = self._find_large(sizes)
        least = LITTLE_LEFT * median([size.norm for size in self._largest.values()] or [0.0])
        counting = {rank for rank, size in sizes.items() if size.norm > least}
        found += self._find_repeated(unit_of, counting)
        found += self._find_one_sided(balance_of, counting)
        if self._drops:
            taken_of = _of_like_count(taken_of)
        found += self._find_lasting(taken_of, counting)
        for group in self._groups:
            found += self._find_opposed({rank: unit_of[rank] for rank in unit_of if rank in group})
        return found

    def _units_of(self, ranks: Iterable[Rank]) -> dict[Rank, Hashable]:
        """Return what each worker is part of: its site only where other sites have like data, as
        other data may honestly make larger values."""
        units: dict[Rank, Hashable] = {rank: rank for rank in ranks}
        for group in self._groups:
            units |= units_of(group & units.keys(), self._sites)
        return units

    def _find_large(self, sizes: Mapping[Rank, _Size]) -> list[tuple[Rank, str, str]]:
        for rank, one in sizes.items():
            before = self._largest.get(rank, one)
            self._largest[rank] = _Size(
                max(one.norm, before.norm), max(one.comparable, before.comparable)
            )
        found = []
        units = self._units_of(self._largest)
        norms = largest_elsewhere({at: size.norm for at, size in self._largest.items()}, units)
        comparables = largest_elsewhere(
            {at: size.comparable for at, size in self._largest.items()}, units
        )
        for rank, one in sizes.items():
            norm, comparable = norms[rank], comparables[rank]
            is_known = not self._leaves_out or any(
                rank in group and len(group) >= MIN_WORKERS for group in self._groups
            )
            is_large = one.norm > LARGE_RATIO * norm and one.comparable > LARGE_RATIO * comparable
            if norm and is_large and is_known:
                self._large[rank] += 1
                if self._large[rank] >= LARGE_ROUNDS:
                    text = f"contributes values with the norm {one.norm:.2g}; the largest of all"
                    others = "others" if units[rank] == rank else "other sites"
                    found.append((rank, "large", f"{text} {others} so far is {norm:.2g}"))
        return found

    def _find_empty(
        self, contributions: Mapping[Rank, Contribution]
    ) -> list[tuple[Rank, str, str]]:
        with_values = {
            rank for rank, one in contributions.items() if one.part is not None and one.part.peak
        }
        found = []
        for rank in contributions:
            is_alone = rank not in with_values and len(with_values) >= MIN_WORKERS - 1
            self._empty[rank] = self._empty[rank] + 1 if is_alone else 0
            if self._empty[rank] >= self._empty_rounds:
                text = f"has contributed samples and no values in {self._empty[rank]} rounds"
                found.append((rank, "empty", text))
        return found

    def _find_opposed(
        self, unit_of: Mapping[Rank, NDArray[np.float32]]
    ) -> list[tuple[Rank, str, str]]:
        if len(unit_of) < MIN_WORKERS:
            return []
        ranks = list(unit_of)
        units_PS = np.stack([unit_of[rank] for rank in ranks])
        middles = []
        for at, row in enumerate((units_PS @ units_PS.T).tolist()):
            others = sorted(row[:at] + row[at + 1 :])
            middles.append(others[len(others) // 2])
        found = []
        for at, rank in enumerate(ranks):
            middle = middles[at]
            # Where all is learned, honest contributions cancel: they oppose, and do not agree. The
            # median ignores others that oppose, too.
            agreement = median(middles[:at] + middles[at + 1 :])
            self._opposition.add(rank, min(-middle, agreement))
            if self._opposition.of(rank) >= LIMIT:
                text = f"contributes values that oppose those of workers of like data: {middle:.2f}"
                found.append((rank, "opposed", f"{text} is their middle cosine"))
        return found

    def _find_one_sided(
        self, balance_of: Mapping[Rank, float], counting: Collection[Rank]
    ) -> list[tuple[Rank, str, str]]:
        if len(balance_of) < MIN_WORKERS:
            return []
        sizes = {rank: abs(one) for rank, one in balance_of.items()}
        found = []
        units = self._units_of(sizes)
        largest = largest_elsewhere(sizes, units)
        for rank, one in sizes.items():
            usual = largest[rank]
            self._one_sidedness.add(rank, one - usual if rank in counting else 0.0)
            if self._one_sidedness.of(rank) >= LIMIT:
                text = f"contributes values of one sign: {(1 + one) / 2:.0%} of them,"
                others = "any other worker's" if units[rank] == rank else "any other site's"
                text = f"{text} at most {(1 + usual) / 2:.0%} of {others}"
                found.append((rank, "one-sided", text))
        return found

    def _find_lasting(
        self, taken_of: Mapping[Rank, NDArray[np.float32]], counting: Collection[Rank]
    ) -> list[tuple[Rank, str, str]]:
        if not taken_of:
            return []
        found = []
        for rank, excess in self._lasting.excesses(taken_of).items():
            self._lasting_excess.add(rank, excess if rank in counting else 0.0)
            is_known = any(rank == at for at, _ in self._reported)  # by a plainer cause
            if self._lasting_excess.of(rank) >= LIMIT and not is_known:
                text = "contributes values that differ from those of workers of like data in one"
                found.append((rank, "lasting", f"{text} direction, round after round"))
        return found

    def _find_repeated(
        self, unit_of: Mapping[Rank, NDArray[np.float32]], counting: Collection[Rank]
    ) -> list[tuple[Rank, str, str]]:
        for rank, unit_S in unit_of.items():
            earlier = self._earlier[rank]
            if len(earlier) == WINDOW:
                cosine = float(unit_S @ earlier[0])
                self._repeats[rank].append(cosine if rank in counting else 0.0)
            earlier.append(unit_S)
        usual = {
            rank: median(self._repeats[rank])
            for rank in unit_of
            if len(self._repeats[rank]) >= MIN_ROUNDS
        }
        found = []
        for rank, cosine in usual.items():
            if cosine <= REPEATED_COSINE:
                continue
            others = [one for at, one in usual.items() if at != rank]
            if len(others) >= 2 and median(others) < CHANGING_COSINE:
                text = f"contributes what it contributed {WINDOW} measured rounds ago"
                found.append((rank, "repeated", text))
        return found


def _of_like_count(taken_of: Mapping[Rank, Values]) -> dict[Rank, Values]:
    """Return those with about as many entries as most: where a link never carries small values,
    they differ from the others' in one direction."""
    counts = {rank: int(np.count_nonzero(one)) for rank, one in taken_of.items()}
    usual = median(counts.values()) if counts else 0
    return {
        rank: taken_of[rank]
        for rank, count in counts.items()
        if usual <= LIKE_COUNT * count <= LIKE_COUNT**2 * usual
    }


def _windows() -> defaultdict[Rank, deque[float]]:
    return defaultdict(lambda: deque(maxlen=WINDOW))
