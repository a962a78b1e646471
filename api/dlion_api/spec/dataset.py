"""`spec.trainer.dataset`: the samples that a job trains on, and their partition."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from dlion_api.bounds import MAX_CLASSES, MAX_SITES, PATH_LENGTH, SITE_NAME_LENGTH
from dlion_api.document import Limits, Rule, at_most_one, optional, setting

ClassLabel = Annotated[int, Limits(minimum=0, maximum=MAX_CLASSES - 1)]
PATH_PLACEHOLDERS = ("{site}", "{group}", "{index}", "{rank}")
"""Placeholders in `path` and `evaluationPath` that each worker replaces with its own values."""
_PLACEHOLDER = "|".join(name.strip("{}") for name in PATH_PLACEHOLDERS)
_PATH: Mapping[str, Any] = {
    "pattern": rf"([^{{}}]|\{{({_PLACEHOLDER})\}})+",
    "pattern_description": f"a path with braces only in {', '.join(PATH_PLACEHOLDERS)}",
    "min_length": 1,
    "max_length": PATH_LENGTH,
}


@dataclass(frozen=True, kw_only=True)
class SiteClasses:
    """The classes at one site."""

    site: str = setting("name of the site.", min_length=1, max_length=SITE_NAME_LENGTH)
    classes: tuple[ClassLabel, ...] = setting(
        "labels of the classes there.", unique=True, min_items=1, max_items=MAX_CLASSES
    )


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """The samples: a data set by name, files by path, or neither if the program loads them."""

    name: (
        Literal["digits", "keras:mnist", "keras:fashion_mnist", "keras:cifar10", "keras:cifar100"]
        | None
    ) = optional("a data set by name: digits, or one of Keras (docs/data.md).")
    path: str | None = optional("a file or directory, relative to the site's data root.", **_PATH)
    format: Literal["tfrecord", "npz", "images"] | None = optional(
        "format at the path: tf.train.Example records with image/encoded and image/class/label,"
        " .npz files with arrays x and y, or a folder of images per class."
    )
    evaluation_path: str | None = optional(
        "a file or directory of held-out samples, in the same format; default: evaluationFraction"
        " of the samples at path are held out.",
        **_PATH,
    )
    evaluation_fraction: float = setting(
        "share of the samples that is held out, if there is no evaluationPath.",
        default=0.1,
        above=0,
        below=1,
    )
    partition: Literal["iid", "dirichlet", "bySite"] = setting(
        "samples are partitioned at random, with class shares of a Dirichlet distribution, or by"
        " whole classes to sites.",
        default="iid",
    )
    dirichlet_alpha: float = setting(
        "concentration of dirichlet: small is skewed, large is uniform.",
        default=0.5,
        above=0,
        maximum=1e6,
    )
    site_classes: tuple[SiteClasses, ...] = setting(
        "classes of each site, for bySite; empty: contiguous ranges over the sites.",
        default=(),
        key="site",
        max_items=MAX_SITES,
    )
    keep_classes: tuple[ClassLabel, ...] = setting(
        "train on these classes only; empty: all.", default=(), unique=True, max_items=MAX_CLASSES
    )
    keep_fraction: float = setting(
        "share of each worker's samples that it trains on.",
        default=1.0,
        above=0,
        maximum=1,
    )
    drop_near_duplicates: bool = setting(
        "leave out samples that are almost equal to an earlier one.", default=False
    )
    near_duplicate_threshold: float = setting(
        "largest distance of near-duplicates, as a fraction of the value range.",
        default=0.05,
        minimum=0,
        maximum=1,
    )
    watch: bool = setting("reload files that change while the job runs.", default=False)

    rules: ClassVar[tuple[Rule, ...]] = (
        at_most_one(name="name", path="path"),
        Rule(
            cel="has(self.path) == has(self.format)",
            message="path and format go together",
            holds=lambda it: (it.path is None) == (it.format is None),
            reads=("format", "path"),
            advice="Give both or neither.",
        ),
        Rule(
            cel="!has(self.evaluationPath) || has(self.path)",
            message="evaluationPath needs path",
            holds=lambda it: it.evaluation_path is None or it.path is not None,
            reads=("evaluationPath", "path"),
            advice="A data set by name brings its own held-out samples.",
        ),
        Rule(
            cel="size(self.siteClasses) == 0 || self.partition == 'bySite'",
            message="siteClasses are for the bySite partition",
            holds=lambda it: not it.site_classes or it.partition == "bySite",
            reads=("siteClasses", "partition"),
            advice="Set partition: bySite.",
        ),
        Rule(
            cel="!self.watch || has(self.path)",
            message="only a path can be watched",
            holds=lambda it: not it.watch or it.path is not None,
            reads=("watch", "path"),
            advice="Give path and format, or leave watch out.",
        ),
        Rule(
            cel="!self.watch || !has(self.path) || has(self.evaluationPath)",
            message="watch needs evaluationPath",
            holds=lambda it: not it.watch or it.path is None or it.evaluation_path is not None,
            reads=("watch", "path", "evaluationPath"),
            advice="Name held-out samples: they must stay the same while the data grows.",
        ),
    )
