"""The data sets that are known: where their files lie, their checksums, how they are read and cut.

Another data set is one more entry of `DATASETS`: its layouts (files, checksums, decoder) and a function
that makes the parts of a `Dataset` from what the decoder returns.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fl_privacy_lib.data import decoders, download, splits
from fl_privacy_lib.data.decoders import FOUR
from fl_privacy_lib.data.files import Arrays, Form, Layout
from fl_privacy_lib.data.splits import Parts


@dataclass(frozen=True)
class Spec:
    """What the library knows of one data set.

    Parameters
    ----------
    title : str
        Its name in prose.
    kind : str
        ``"image"`` or ``"tabular"``.
    layouts : tuple of Layout
        The forms in which its files may lie in the data folder, in the order in which they are looked for.
    build : callable
        Makes the parts from a layout's arrays.
    licence, source, note : str
        As in `Dataset`.
    fetch : callable or None
        Downloads the files into a data folder; None if nothing can be or need be downloaded.
    """

    title: str
    kind: str
    layouts: tuple[Layout, ...]
    build: Callable[[Arrays], Parts]
    licence: str
    source: str
    note: str
    fetch: Callable[[Path], None] | None = None


def _idx(path: str, compressed: str, plain: str) -> tuple[Form, ...]:
    """Return the two forms of an idx file with their SHA-256."""
    return Form(f"{path}.gz", f"sha256:{compressed}"), Form(path, f"sha256:{plain}")


_MNIST = Layout(
    files=(
        _idx(
            "MNIST/raw/train-images-idx3-ubyte",
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        ),
        _idx(
            "MNIST/raw/train-labels-idx1-ubyte",
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        ),
        _idx(
            "MNIST/raw/t10k-images-idx3-ubyte",
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        ),
        _idx(
            "MNIST/raw/t10k-labels-idx1-ubyte",
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
    ),
    decode=decoders.decode_mnist,
    arrays=FOUR,
)


def _batch(name: str, md5: str) -> tuple[Form, ...]:
    """Return the one form of a CIFAR-10 pickle, with the MD5 that its authors publish."""
    return (Form(f"cifar-10-batches-py/{name}", f"md5:{md5}"),)


_CIFAR_PICKLES = Layout(
    files=(
        _batch("data_batch_1", "c99cafc152244af753f735de768cd75f"),
        _batch("data_batch_2", "d4bba439e000b95fd0a9bffe97cbabec"),
        _batch("data_batch_3", "54ebc095f3ab1f0389bbae665268c751"),
        _batch("data_batch_4", "634d18415352ddfa80567beed471001a"),
        _batch("data_batch_5", "482c414d41f54cd18b22e5b47cb7c3cb"),
        _batch("test_batch", "40351d587109b95175f43aff81a1287e"),
        _batch("batches.meta", "5ff9c542aee3614f3951f8cda6e48888"),
    ),
    decode=decoders.decode_cifar_pickles,
    arrays=FOUR,
    note="All 10,000 test images are there.",
)
_CIFAR_PARQUET = Layout(
    files=(
        (
            Form(
                "CIFAR10/train-00000-of-00001.parquet",
                "sha256:6b51483c78b9c93c8ce6457d4f400e68b1425653d371f1e13bfd55cb28f0a3d9",
            ),
        ),
        (
            Form(
                "CIFAR10/test-00000-of-00001.parquet",
                "sha256:364aa5d702aa5362c204883c4d35b0b7244125ca6cfdf995ac71da8b376f0cd4",
            ),
        ),
    ),
    decode=decoders.decode_cifar_parquet,
    arrays=FOUR,
    note="Only the first 1,017 of the 10,000 test images are in these files.",
)
_LFW = Layout(
    files=(
        (
            Form(
                "LFW/lfw20_32x32.npz",
                "sha256:ca93cd1bf00f2f67a6a62a6c613f1db2b143af4d13cdde93307a1b0a11293e11",
            ),
        ),
    ),
    decode=decoders.decode_lfw,
    arrays=("images", "labels", "names"),
    note="The original pictures, not the funneled (aligned) ones that scikit-learn returns by default.",
)
_LFW_FUNNELED = Layout(
    files=((Form(download.LFW_FUNNELED),),),
    decode=decoders.decode_lfw,
    arrays=("images", "labels", "names"),
    note="The funneled (aligned) pictures, as scikit-learn downloads them; lfw20_32x32.npz has others.",
)


def _embedded(decode: Callable[..., Arrays], *arrays: str) -> tuple[Layout, ...]:
    """Return the layout of data that come with scikit-learn: no files."""
    return (Layout(files=(), decode=decode, arrays=arrays),)


DATASETS: dict[str, Spec] = {
    "mnist": Spec(
        title="MNIST",
        kind="image",
        layouts=(_MNIST,),
        build=splits.build_mnist,
        licence="usually cited as CC BY-SA 3.0",
        source="LeCun, Cortes and Burges, The MNIST database of handwritten digits",
        note="50,000 images for training; the last 10,000 of the original training set validate; "
        "the 10,000 test images are kept apart.",
        fetch=download.mnist,
    ),
    "cifar10": Spec(
        title="CIFAR-10",
        kind="image",
        layouts=(_CIFAR_PICKLES, _CIFAR_PARQUET),
        build=splits.build_cifar,
        licence="no formal licence",
        source="Krizhevsky, Learning multiple layers of features from tiny images, 2009",
        note="40,000 images for training; the last 10,000 of the original training set validate.",
        fetch=download.cifar10,
    ),
    "lfw": Spec(
        title="LFW",
        kind="image",
        layouts=(_LFW, _LFW_FUNNELED),
        build=splits.build_lfw,
        licence="for research, no formal licence",
        source="Huang, Ramesh, Berg and Learned-Miller, Labeled Faces in the Wild, 2007",
        note="The 62 people with at least 20 pictures, cropped to rows 70 to 194 and columns 78 to 171 and "
        "resized to 32 x 32; 2,267 for training and 756 to validate, shuffled once "
        f"(seed {splits.SPLIT_SEED}), not stratified; no test images.",
        fetch=download.lfw,
    ),
    "cancer": Spec(
        title="Breast cancer",
        kind="tabular",
        layouts=_embedded(decoders.decode_cancer, "x", "y", "classes"),
        build=splits.build_cancer,
        licence="CC BY 4.0",
        source="Wolberg, Mangasarian, Street and Street, Breast Cancer Wisconsin (Diagnostic), 1993, "
        "as it comes with scikit-learn",
        note=f"426 records for training and 143 to validate, shuffled once (seed {splits.SPLIT_SEED}), not "
        "stratified; no test records. Each attribute is scaled by its range over the training records; "
        "validation values outside it are clipped to [0, 1].",
    ),
    "digits": Spec(
        title="Digits",
        kind="image",
        layouts=_embedded(decoders.decode_digits, "x", "y"),
        build=splits.build_digits,
        licence="CC BY 4.0",
        source="Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, 1998, "
        "as it comes with scikit-learn",
        note="8 x 8 images resized to 28 x 28 by linear interpolation, so that they fit where MNIST does; "
        "they are not MNIST. 1,347 for training and 450 to validate, shuffled once "
        f"(seed {splits.SPLIT_SEED}), not stratified; no test images.",
    ),
}
