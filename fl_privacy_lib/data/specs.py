"""The data sets that are known: where their files lie, their checksums, how they are read and cut.

Another data set is one more entry of `DATASETS`: its layouts (files, checksums, decoder) and a
function that makes the parts of a `Dataset` from what the decoder returns.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from fl_privacy_lib.data import decoders, download, splits, tabular
from fl_privacy_lib.data.files import Arrays, Layout
from fl_privacy_lib.data.splits import About, Parts


@dataclass(frozen=True, kw_only=True)
class Spec(About):
    """What the library knows of one data set, besides what `About` has.

    Parameters
    ----------
    layouts : tuple of Layout
        The forms in which its files may lie in the data folder, in the order in which they are
        looked for.
    build : callable
        Makes the parts from a layout's arrays.
    fetch : callable or None
        Downloads the files into a data folder; None if nothing can be or need be downloaded.
    """

    layouts: tuple[Layout, ...]
    build: Callable[[Arrays], Parts]
    fetch: Callable[[Path], None] | None = None


def _layout(
    decode: Callable[[Sequence[Path]], Arrays], files: dict[str, str], note: str = ""
) -> Layout:
    """Return the layout of files with one form each: path → checksum, empty if none is known."""
    return Layout(tuple((form,) for form in files.items()), decode, note)


def _adult(title: str, build: Callable[[Arrays], Parts], note: str) -> Spec:
    """Return one of the two forms of Adult."""
    return Spec(
        title=title,
        kind="tabular",
        layouts=(
            _layout(
                tabular.decode_adult,
                {
                    "Adult/adult.data": "sha256:"
                    "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d",
                    "Adult/adult.test": "sha256:"
                    "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05",
                },
            ),
        ),
        build=build,
        licence="CC BY 4.0",
        source="Becker and Kohavi, Adult, UCI Machine Learning Repository, 1996",
        note=f"{note} {_describe_cut(36_631, 12_211)}",
        fetch=download.adult,
    )


def _synthetic(title: str, records: int, columns: int, remark: str = "") -> Spec:
    """Return one of the two synthetic sets."""
    decode = partial(tabular.decode_synthetic, records=records, columns=columns)
    return Spec(
        title=title,
        kind="tabular",
        layouts=(Layout(files=(), decode=decode),),
        build=tabular.build_synthetic,
        licence="none needed: the records are drawn",
        source="the recipe of Wangni, Wang, Liu and Zhang, Gradient sparsification for "
        "communication-efficient distributed optimization, 2018",
        note="Drawn with C1 = 0.01 and C2 = 0.9, with the same magnitudes for every record"
        f"{remark}. The values are not scaled: some lie outside [-1, 1]. "
        f"{_describe_cut(3 * records // 4, records // 4)}",
    )


def _describe_cut(train: int, validation: int) -> str:
    """Return the sentence on records that were cut at random."""
    return (f"{train:,} records for training and {validation:,} to validate, shuffled once "
            f"(seed {splits.SPLIT_SEED}), not stratified; no test records.")  # fmt: skip


_SCALED = ("Each attribute is scaled by its range over the training records; values outside it "
           "are clipped to [0, 1].")  # fmt: skip

# file of an idx image set → SHA-256 compressed, and as it is
_MNIST = {
    "train-images-idx3-ubyte": (
        "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    ),
    "train-labels-idx1-ubyte": (
        "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    ),
    "t10k-images-idx3-ubyte": (
        "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    ),
    "t10k-labels-idx1-ubyte": (
        "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
}
_FASHION = {
    "train-images-idx3-ubyte": (
        "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    ),
    "train-labels-idx1-ubyte": (
        "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    ),
    "t10k-images-idx3-ubyte": (
        "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    ),
    "t10k-labels-idx1-ubyte": (
        "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
}


def _idx_images(
    title: str,
    folder: str,
    sums: dict[str, tuple[str, str]],
    classes: tuple[str, ...],
    **about: Any,
) -> Spec:
    """Return a set of 70,000 images in the layout of MNIST."""
    files = tuple(
        ((f"{folder}/raw/{name}.gz", f"sha256:{gz}"), (f"{folder}/raw/{name}", f"sha256:{plain}"))
        for name, (gz, plain) in sums.items()
    )
    return Spec(
        title=title,
        kind="image",
        layouts=(Layout(files=files, decode=decoders.decode_mnist),),
        build=partial(splits.cut_tail, classes=classes),
        note="50,000 images for training; the last 10,000 of the original training set validate; "
        "the 10,000 test images are kept apart.",
        **about,
    )


DATASETS: dict[str, Spec] = {
    "mnist": _idx_images(
        "MNIST",
        "MNIST",
        _MNIST,
        licence="usually cited as CC BY-SA 3.0",
        source="LeCun, Cortes and Burges, The MNIST database of handwritten digits",
        classes=splits.DIGIT_CLASSES,
        fetch=partial(download.from_torchvision, name="MNIST"),
    ),
    "fashion_mnist": _idx_images(
        "Fashion-MNIST",
        "FashionMNIST",
        _FASHION,
        licence="MIT",
        source="Xiao, Rasul and Vollgraf, Fashion-MNIST: a novel image dataset",
        classes=splits.CLOTHES_CLASSES,
        fetch=partial(download.from_torchvision, name="FashionMNIST"),
    ),
    "cifar10": Spec(
        title="CIFAR-10",
        kind="image",
        layouts=(
            _layout(
                decoders.decode_cifar_pickles,
                {
                    # the MD5 that its authors publish
                    "cifar-10-batches-py/data_batch_1": "md5:c99cafc152244af753f735de768cd75f",
                    "cifar-10-batches-py/data_batch_2": "md5:d4bba439e000b95fd0a9bffe97cbabec",
                    "cifar-10-batches-py/data_batch_3": "md5:54ebc095f3ab1f0389bbae665268c751",
                    "cifar-10-batches-py/data_batch_4": "md5:634d18415352ddfa80567beed471001a",
                    "cifar-10-batches-py/data_batch_5": "md5:482c414d41f54cd18b22e5b47cb7c3cb",
                    "cifar-10-batches-py/test_batch": "md5:40351d587109b95175f43aff81a1287e",
                    "cifar-10-batches-py/batches.meta": "md5:5ff9c542aee3614f3951f8cda6e48888",
                },
                "All 10,000 test images are there.",
            ),
            # No checksum of the files: the same pixels can be stored in many ways, so the decoder
            # compares the pixels.
            _layout(
                decoders.decode_cifar_parquet,
                {
                    "CIFAR10/train-00000-of-00001.parquet": "",
                    "CIFAR10/test-00000-of-00001.parquet": "",
                },
                "The test images are those of the Parquet file, at least the first 1,017 of the "
                "10,000.",
            ),
        ),
        build=partial(splits.cut_tail, classes=splits.CIFAR_CLASSES),
        licence="no formal licence",
        source="Krizhevsky, Learning multiple layers of features from tiny images, 2009",
        note="40,000 images for training; the last 10,000 of the original training set validate.",
        fetch=partial(download.from_torchvision, name="CIFAR10"),
    ),
    "lfw": Spec(
        title="LFW",
        kind="image",
        layouts=(
            _layout(
                decoders.decode_lfw,
                {
                    "LFW/lfw20_32x32.npz": "sha256:"
                    "ca93cd1bf00f2f67a6a62a6c613f1db2b143af4d13cdde93307a1b0a11293e11"
                },
                "The original pictures, not the funneled (aligned) ones that scikit-learn returns "
                "by default.",
            ),
            _layout(
                decoders.decode_lfw,
                {download.LFW_FUNNELED: ""},
                "The funneled (aligned) pictures, as scikit-learn downloads them; lfw20_32x32.npz "
                "has others.",
            ),
        ),
        build=lambda arrays: splits.cut_three_to_one(
            splits.channels_first(arrays["images"]), arrays["labels"], arrays["names"].tolist()
        ),
        licence="for research, no formal licence",
        source="Huang, Ramesh, Berg and Learned-Miller, Labeled Faces in the Wild, 2007",
        note="The 62 people with at least 20 pictures, cropped to rows 70 to 194 and columns 78 to "
        "171 and resized to 32 x 32; 2,267 for training and 756 to validate, shuffled once "
        f"(seed {splits.SPLIT_SEED}), not stratified; no test images.",
        fetch=download.lfw,
    ),
    "cancer": Spec(
        title="Breast cancer",
        kind="tabular",
        layouts=(Layout(files=(), decode=partial(decoders.decode_bundled, name="breast_cancer")),),
        build=lambda arrays: splits.scaled_by_training(
            splits.cut_three_to_one(arrays["x"], arrays["y"], arrays["classes"].tolist())
        ),
        licence="CC BY 4.0",
        source="Wolberg, Mangasarian, Street and Street, Breast Cancer Wisconsin (Diagnostic), "
        "1993, as it comes with scikit-learn",
        note=f"{_describe_cut(426, 143)} {_SCALED}",
    ),
    "digits": Spec(
        title="Digits",
        kind="image",
        layouts=(Layout(files=(), decode=partial(decoders.decode_bundled, name="digits")),),
        build=splits.build_digits,
        licence="CC BY 4.0",
        source="Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, 1998, "
        "as it comes with scikit-learn",
        note="8 x 8 images resized to 28 x 28 by linear interpolation, so that they fit where "
        "MNIST does; they are not MNIST. 1,347 for training and 450 to validate, shuffled once "
        f"(seed {splits.SPLIT_SEED}), not stratified; no test images.",
    ),
    "adult": _adult(
        "Adult",
        partial(tabular.build, classes=("<=50K", ">50K")),
        "105 columns, as in Fed-CDP: 6 numbers and a column for each of the 99 categories; a "
        f"missing value (?) has zeros in all columns of its attribute. {_SCALED}",
    ),
    "adult_123": _adult(
        "Adult, 123 columns",
        tabular.build_adult_123,
        "123 columns of zeros and ones, as in FedSel and in LIBSVM's a9a: the 6 numbers become "
        "5 + 5 + 5 + 2 + 2 + 5 bins, and each of the 99 categories is a column; a missing value "
        "(?) has zeros in all columns of its attribute. A rebuilding: the edges of the bins are "
        "unpublished; these are the quintiles of adult.data, with ties moved apart.",
    ),
    "bank": Spec(
        title="Bank Marketing",
        kind="tabular",
        layouts=(
            _layout(
                tabular.decode_bank,
                {
                    "BankMarketing/bank-full.csv": "sha256:"
                    "d1513ec63b385506f7cfce9f2c5caa9fe99e7ba4e8c3fa264b3aaf0f849ed32d"
                },
            ),
        ),
        build=partial(tabular.build, classes=("no", "yes"), first=1),
        licence="CC BY 4.0",
        source="Moro, Cortez and Rita, Bank Marketing, UCI Machine Learning Repository, 2012",
        note="32 columns, as many as in FedSel, which does not say which: here the 7 numbers, the "
        "month as a number from 1 to 12, and a column for each category but the first, in "
        "alphabetical order, of the other 8 attributes. "
        f"{_SCALED} {_describe_cut(33_908, 11_303)}",
        fetch=download.bank,
    ),
    "kdd99": Spec(
        title="KDD Cup 99",
        kind="tabular",
        layouts=(
            _layout(
                tabular.decode_kdd99,
                {
                    "KDDCup99/kddcup.data_10_percent.gz": "sha256:"
                    "8045aca0d84e70e622d1148d7df782496f6333bf6eb979a1b0837c42a9fd9561"
                },
            ),
        ),
        build=partial(tabular.build, classes=("normal", "attack")),
        licence="CC BY 4.0",
        source="Hettich and Bay, The UCI KDD Archive, 1999; the 10-percent file",
        note=f"70,000 of the 494,021 records, drawn once (seed {splits.SPLIT_SEED}); class 1 is "
        "any attack. 113 columns, the 38 numbers and the categories that occur among the records "
        "drawn; FedSel has 114, and other draws give 111 to 117. Most records are copies of "
        "others, so that many are both for training and held out. "
        f"{_SCALED} {_describe_cut(52_500, 17_500)}",
        fetch=download.kdd99,
    ),
    "syn_l": _synthetic("syn-L", 60_000, 100),
    "syn_h": _synthetic("syn-H", 100_000, 300, ", as for syn-L; the paper gives none for syn-H"),
}


CIFAR = DATASETS["cifar10"]
DATASETS["cifar10_scattering"] = replace(
    CIFAR, title="CIFAR-10, scattering transform", kind="tabular",
    layouts=tuple(replace(a, decode=partial(decoders.decode_features, images=a.decode))
                  for a in CIFAR.layouts),
    build=partial(splits.cut_tail, classes=splits.CIFAR_CLASSES, scaled=lambda features: features),
    note=f"{CIFAR.note} In place of an image stand 3,888 features: its scattering transform with "
    "two scales and eight angles, means of 2 x 2 places, nine channels at a time normalised "
    "within the image.",
)  # fmt: skip


def _standardised(spec: Spec) -> Spec:
    """Return a tabular data set with z-scores in place of its scaled columns."""
    return replace(
        spec, title=f"{spec.title}, z-scored",
        build=lambda arrays: splits.standardised(spec.build(arrays)),
        note=f"{spec.note} Then each column is z-scored over the training records.",
    )  # fmt: skip


DATASETS |= {f"{name}_z": _standardised(DATASETS[name]) for name in ("adult", "cancer")}
