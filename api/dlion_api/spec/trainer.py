"""`spec.trainer`: model, data, optimizer, evaluation and stop rules."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Final, Literal, TypeAlias, get_args

from dlion_api.bounds import (
    IMAGE_LENGTH,
    INT32_MAX,
    OBJECT_NAME_FORM,
    PATH_LENGTH,
)
from dlion_api.document import Limits, Rule, exactly_one, optional, setting
from dlion_api.spec.dataset import Dataset
from dlion_api.spec.initializers import Initializer
from dlion_api.spec.privacy import Privacy

VariablePattern = Annotated[str, Limits(min_length=1, max_length=256)]
Builtin: TypeAlias = Literal["cipher", "cnn17", "digits", "mobilenet"]
BUILTINS: Final[tuple[str, ...]] = get_args(Builtin)


@dataclass(frozen=True, kw_only=True)
class ConfigMapKey:
    """One key of a ConfigMap in the job's namespace."""

    name: str = setting("name of the ConfigMap.", **OBJECT_NAME_FORM)
    key: str = setting(
        "key that holds the program.",
        pattern=r"[-._a-zA-Z0-9]+",
        pattern_description="letters, digits, dashes, dots and underscores",
        max_length=253,
    )


@dataclass(frozen=True, kw_only=True)
class Program:
    """The model: a built-in program or the user's own (`dlion init` writes a template)."""

    builtin: Builtin | None = optional("a program that comes with DLion.")
    module: str | None = optional(
        "an importable module with build_model() and, optionally, load_data() and loss().",
        pattern=r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*",
        pattern_description="a dotted Python name",
        max_length=256,
    )
    file: str | None = optional(
        "a Python file with the functions of a module; the path is relative to the manifest.",
        pattern=r".*[^/]\.py",
        pattern_description="a path that ends in .py",
        max_length=PATH_LENGTH,
    )
    config_map: ConfigMapKey | None = optional("a key of a ConfigMap that has such a file.")

    rules: ClassVar[tuple[Rule, ...]] = (
        exactly_one(builtin="builtin", module="module", file="file", config_map="configMap"),
    )


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """How weights are updated from a gradient."""

    name: Literal["sgd", "adam", "program"] = setting(
        "the algorithm; program: its optimizer() returns it.", default="sgd"
    )
    learning_rate: float = setting(
        "size of a step. An optimizer of the program has its own.",
        default=0.05,
        above=0,
        maximum=100,
    )
    momentum: float = setting("momentum of sgd.", default=0.9, minimum=0, below=1)
    nesterov: bool = setting("Nesterov momentum, for sgd.", default=False)
    beta1: float = setting("decay of adam's first moment.", default=0.9, minimum=0, below=1)
    beta2: float = setting("decay of adam's second moment.", default=0.999, minimum=0, below=1)
    epsilon: float = setting(
        "adam's guard against division by 0.", default=1e-7, above=0, maximum=1
    )
    learning_rate_scaling: Literal["none", "linear", "sqrt"] = setting(
        "how the learning rate follows a growing global batch size.",
        default="none",
    )
    learning_rate_max_factor: float = setting(
        "maximum factor by which that scaling raises the rate.",
        default=4.0,
        minimum=1,
        maximum=1000,
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!self.nesterov || (self.name == 'sgd' && self.momentum > 0.0)",
            message="nesterov needs name: sgd and a momentum above 0",
            holds=lambda it: not it.nesterov or (it.name == "sgd" and it.momentum > 0),
            reads=("nesterov", "name", "momentum"),
        ),
    )


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """When replicas are evaluated on the held-out samples."""

    every_samples: int = setting(
        "samples of the whole job between two evaluations; one that falls into a round of local"
        " steps takes place at its end.",
        default=5000,
        minimum=1,
        maximum=10**12,
        unit="samples",
    )
    max_samples: int = setting(
        "held-out samples of each evaluation; the one at the end uses all.",
        default=2000,
        minimum=1,
        maximum=10**9,
        unit="samples",
    )


@dataclass(frozen=True, kw_only=True)
class Stop:
    """Stop rules: the run ends when the first one is met at any worker."""

    max_steps: int | None = optional("steps of a worker.", minimum=1, maximum=10**12)
    max_seconds: int | None = optional(
        "training time.", minimum=1, maximum=INT32_MAX, unit="seconds"
    )
    target_accuracy: float | None = optional(
        "held-out accuracy, mean over replicas.", above=0, maximum=1
    )
    max_epochs: int | None = optional("passes over the training samples.", minimum=1, maximum=10**6)
    continuous: bool = setting(
        "train until stopped; models are saved at the checkpoint interval.",
        default=False,
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="has(self.maxSteps) || has(self.maxSeconds) || has(self.targetAccuracy)"
            " || has(self.maxEpochs) || self.continuous",
            message="a run needs a stop rule",
            holds=lambda it: (
                it.continuous
                or any(
                    end is not None
                    for end in (it.max_steps, it.max_seconds, it.target_accuracy, it.max_epochs)
                )
            ),
            reads=("", "maxSteps", "maxSeconds", "targetAccuracy", "maxEpochs", "continuous"),
            advice="Give maxSteps, maxSeconds, targetAccuracy or maxEpochs, or continuous: true.",
        ),
    )


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """The model, its data, and how it is trained."""

    image: str = setting(
        "container image of workers and keeper; empty: the chart's. A change takes effect in the"
        " next run.",
        default="",
        max_length=IMAGE_LENGTH,
        hashed=False,
    )
    program: Program = setting("the model.")
    dataset: Dataset = setting("the samples.", default=Dataset())
    initializer: Initializer = setting("downloads before training.", default=Initializer())
    optimizer: Optimizer = setting("the optimizer.", default=Optimizer())
    seed: int = setting("seed of all random numbers.", default=1, minimum=0, maximum=INT32_MAX)
    evaluation: Evaluation = setting("when replicas are evaluated.", default=Evaluation())
    privacy: Privacy | None = optional(
        "differential privacy of single samples (docs/privacy.md). Default: none."
    )
    freeze: tuple[VariablePattern, ...] = setting(
        "variables that are neither trained nor exchanged: shell-style patterns.",
        default=(),
        unique=True,
        max_items=64,
    )
    start_from: str = setting(
        "an earlier model to start from: a .keras file or result folder; empty: a new one.",
        default="",
        max_length=PATH_LENGTH,
    )
    encoder: str = setting(
        "a trained model that stays as it is (docs/staged.md), a .keras file; the program's model"
        " takes its outputs. Empty: none.",
        default="",
        max_length=PATH_LENGTH,
    )
    hash_weights: bool = setting(
        "record a hash of the weights after every step (costs time).",
        default=False,
    )
    stop: Stop = setting("when the run ends.")

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!has(self.program.builtin) || has(self.dataset.name) || has(self.dataset.path)",
            message="a built-in program needs a data set",
            holds=lambda it: (
                it.program.builtin is None
                or it.dataset.name is not None
                or it.dataset.path is not None
            ),
            reads=("dataset", "program"),
            advice="Give dataset.name, or dataset.path with dataset.format.",
        ),
        Rule(
            cel="!has(self.program.builtin) || self.optimizer.name != 'program'",
            message="a built-in program has no optimizer of its own",
            holds=lambda it: it.program.builtin is None or it.optimizer.name != "program",
            reads=("optimizer.name", "program"),
            advice="Name sgd or adam, or a program with optimizer().",
        ),
        Rule(
            cel="self.encoder == '' || (self.startFrom == '' && !self.dataset.watch)",
            message="with an encoder, training starts from a new model and its data do not grow",
            holds=lambda it: not it.encoder or not (it.start_from or it.dataset.watch),
            reads=("encoder", "startFrom", "dataset.watch"),
            advice="Leave out startFrom and dataset.watch, or the encoder.",
        ),
        Rule(
            cel="!has(self.initializer.dataset) || (has(self.dataset.path) && !self.dataset.watch)",
            message="initializer.dataset needs dataset.path, and does not grow",
            holds=lambda it: (
                it.initializer.dataset is None
                or (it.dataset.path is not None and not it.dataset.watch)
            ),
            reads=("initializer.dataset", "dataset.path", "dataset.watch"),
            advice="Name the file or folder in what is downloaded, without dataset.watch.",
        ),
        Rule(
            cel="!has(self.initializer.model) || self.startFrom != '' || self.encoder != ''",
            message="initializer.model needs startFrom or encoder",
            holds=lambda it: it.initializer.model is None or bool(it.start_from or it.encoder),
            reads=("initializer.model", "startFrom", "encoder"),
            advice="Name the .keras file in what is downloaded.",
        ),
    )
