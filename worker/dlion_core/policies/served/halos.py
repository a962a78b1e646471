"""Policy `halos`: a server in each site, and one of all sites above them, both asynchronous.

Each worker makes H local steps from the weights of its site's server and sends its change there
(`served_worker`). The server applies it at once and answers with its weights. After K changes it
sends the change of its weights since it last received those of the global server, and continues to
serve. The global server applies that at once and answers with the global weights W. The site's
server takes a part of them,

    w <- (1 - a) w + a W.

No worker waits for a third one. One message is sent between sites for K inside a site. Changes
that a site's server applied while its own was in transit are in its weights only. Both servers
apply changes by `DelayedNesterov`. The site's server is the lowest rank of the site that trains,
the global one the lowest of all.

A change counts by the batch of its worker over the mean batch of its site, and a site's by the
samples of its workers over the mean of sites, so that batches may follow capacity.

Source: Kim et al., "HALoS: hierarchical asynchronous local SGD over slow networks for
geo-distributed large language model training", ICML 2025, and its authors' code (rule and a, both
momenta, periods). Ours: the servers train; weights by samples; learning rates, H and K for small
sites.
"""

from collections.abc import Mapping

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_core.codecs import GradientPart
from dlion_core.policies.context import PolicyContext
from dlion_core.policies.interface import Flat, Instruction, Message, MessageKind, Value
from dlion_core.policies.round_parameters import HalosParameters
from dlion_core.policies.served.outer_optimizer import DelayedNesterov
from dlion_core.policies.served.served_worker import Change, Form, ServedWorker, as_vector
from dlion_core.policies.state_values import vector_or_none

_LOCAL, _GLOBAL = "local_", "global_"
"""Prefixes of checkpoint keys of the two optimizers."""


class Halos(ServedWorker):
    """One worker, and what it does as the server of its site and of all sites."""

    def __init__(self, context: PolicyContext, parameters: HalosParameters) -> None:
        super().__init__(context, local_steps=parameters.local_steps)
        self._parameters = parameters
        own = context.sites.get(self.rank, "")
        self._site = frozenset(r for r in context.ranks if context.sites.get(r, "") == own)
        self._local, self._global = self._new_local(), self._new_global()
        self._model_D: Flat | None = None
        """Weights of the site."""
        self._merged_D: Flat | None = None
        """The site's model when it last took the global one."""
        self._global_D: Flat | None = None
        self._count = self._gathered = 0
        """Changes, and their samples, since then."""
        self._awaits: tuple[Rank, int] | None = None
        """The global server that owes an answer, and the iteration of the site's change."""
        self._global_server = self.rank
        """The one of the site's last change; this worker while the site has not sent any."""

    def _new_local(self) -> DelayedNesterov:
        it = self._parameters
        return DelayedNesterov(it.local_learning_rate, it.local_momentum, it.local_period)

    def _new_global(self) -> DelayedNesterov:
        it = self._parameters
        return DelayedNesterov(it.global_learning_rate, it.global_momentum, it.global_period)

    def server(self) -> Rank:
        return self.lowest(self._site)

    def max_samples(self, form: Form, iteration: int) -> int:
        """As of all policies; changes of a site gather while its global server is away."""
        of_one = super().max_samples(form, iteration)
        return of_one if form is Form.CHANGE else of_one * self._parameters.accumulate

    def model_for(self, form: Form) -> Flat:
        if form is Form.SITE_CHANGE:
            if self._global_D is None:  # where the other sites' models are from: not the own one
                known_D = self._merged_D
                self._global_D = self.own_weights() if known_D is None else known_D.copy()
            return self._global_D
        if self._model_D is None:
            self._model_D = self.own_weights()
            self._merged_D = self._model_D
        return self._model_D

    def take(self, form: Form, sender: Rank, change: Change) -> list[Instruction]:
        """Apply a change at once, and answer."""
        if form is Form.CHANGE and sender not in self._site:
            raise ContractError(f"change of worker {sender}, of another site; allowed: of a site")
        model_D = self.model_for(form)
        if form is Form.SITE_CHANGE:
            self._apply_site_change(sender, change)
            return self.answer(form, sender, change.iteration)
        gradient_D = as_vector(change.part, -self._weight(sender, change.local_batch_size))
        self._model_D = model_D - self._local.step(gradient_D)
        self._count += 1
        self._gathered += change.samples
        sent = self._send_to_global() if self._count >= self._parameters.accumulate else []
        return [*sent, *self.answer(form, sender, change.iteration)]

    def _apply_site_change(self, sender: Rank, change: Change) -> Flat:
        gradient_D = as_vector(change.part, -self._weight_of_site(sender, change.local_batch_size))
        self._global_D = self.model_for(Form.SITE_CHANGE) - self._global.step(gradient_D)
        return self._global_D

    def _send_to_global(self) -> list[Instruction]:
        """Give the global server what the site's model changed by, unless it owes an answer."""
        if self._awaits is not None:
            return []
        assert self._model_D is not None
        assert self._merged_D is not None
        server, own = self.lowest(), max(1, self.synchronizer.own)
        self._global_server = server
        change_D = self._model_D - self._merged_D
        samples = min(self._gathered, self.max_samples(Form.SITE_CHANGE, own))
        batch = min(self.local_batch_size, samples)
        change = Change(GradientPart(change_D), samples, batch, own)
        if server == self.rank:
            self._merge(self._apply_site_change(self.rank, change))
            return []
        self._awaits = (server, own)
        return [self.change_message(server, Form.SITE_CHANGE, change_D, change)]

    def _merge(self, global_D: Flat) -> None:
        assert self._model_D is not None
        part = self._parameters.merge_weight
        self._model_D = ((1 - part) * self._model_D + part * global_D).astype(global_D.dtype)
        self._merged_D = self._model_D
        self._count = self._gathered = 0

    def global_model_arrived(self, sender: Rank, iteration: int, weights_D: Flat) -> None:
        """Take a part of the global model. One that is not awaited is late: leave it out."""
        if self._awaits == (sender, iteration):
            self._awaits = None
            self._merge(weights_D)

    def passed_over(self, sender: Rank, message: Message) -> list[Instruction]:
        """As of all; global weights that are invalid are not awaited again either. The change is in
        the global model: the next one begins after it."""
        form = message.weights_version % len(Form)
        is_global = message.kind is MessageKind.WEIGHTS and form == Form.GLOBAL_MODEL
        if is_global and self._awaits == (sender, message.iteration):
            self._awaits, self._merged_D = None, self._model_D
            self._count = self._gathered = 0
        return super().passed_over(sender, message)

    def left(self, rank: Rank) -> None:
        """Send the site's next change to the next global server."""
        super().left(rank)
        if self._awaits is not None and self._awaits[0] == rank:
            self._awaits = None
        if self._global_server == rank:
            self._global_server = self.lowest()
            if self._global_server == self.rank:
                self._begin_serving_all()

    def begin_serving(self) -> None:
        self._model_D = self._merged_D = self._awaits = None
        self._local, self._count, self._gathered = self._new_local(), 0, 0
        if self.lowest() == self.rank:  # its server was the global one
            self._begin_serving_all()

    def _begin_serving_all(self) -> None:
        """Forget the weights of an earlier time as the global server."""
        self._global_D, self._global = None, self._new_global()

    # ---- weights ---------------------------------------------------------------------------------

    def _weight(self, sender: Rank, batch: int) -> float:
        """Return a worker's batch over the mean of its site."""
        sizes = {rank: size for rank, size in self.batch_sizes().items() if rank in self._site}
        sizes[sender] = batch
        return batch * len(sizes) / sum(sizes.values())

    def _weight_of_site(self, sender: Rank, batch: int) -> float:
        """Return the batches of a site over the mean of sites."""
        of_site: dict[str, int] = {}
        for rank, size in ({sender: batch} | self.batch_sizes()).items():
            site = self.context.sites.get(rank, "")
            of_site[site] = of_site.get(site, 0) + size
        own = of_site[self.context.sites.get(sender, "")]
        return own * len(of_site) / sum(of_site.values())

    # ---- checkpoints -----------------------------------------------------------------------------

    def state(self) -> dict[str, Value]:
        state: dict[str, Value] = {
            **super().state(),
            **self._local.state(_LOCAL),
            **self._global.state(_GLOBAL),
            "site_changes": self._count,
            "site_samples": self._gathered,
        }
        vectors = {
            "model_D": self._model_D, "merged_D": self._merged_D, "global_D": self._global_D,
        }  # fmt: skip
        return state | {name: one.copy() for name, one in vectors.items() if one is not None}

    def restore(self, state: Mapping[str, Value]) -> None:
        super().restore(state)
        self._local.restore(state, _LOCAL)
        self._global.restore(state, _GLOBAL)
        self._count, self._gathered = int(state["site_changes"]), int(state["site_samples"])
        self._model_D = vector_or_none(state, "model_D")
        self._merged_D = vector_or_none(state, "merged_D")
        self._global_D = vector_or_none(state, "global_D")
