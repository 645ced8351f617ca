"""Loading a data set by name: `available`, `verify`, `fetch` and `load`.

The first three read no image (but `verify` a reader's own), so that a notebook can refuse a wrong
parameter before anything heavy is imported. Files are looked for in a data folder that the caller
names; the library reads no environment.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fl_privacy_lib._checks import InputError, one_of
from fl_privacy_lib.data import npz
from fl_privacy_lib.data.download import network
from fl_privacy_lib.data.files import Layout, cached, check, find, is_file, missing
from fl_privacy_lib.data.specs import DATASETS, Spec
from fl_privacy_lib.data.splits import About, Parts


@dataclass(frozen=True, eq=False, kw_only=True)
class Dataset(About, Parts):
    """A data set in memory: its parts, and what a reader must know of it.

    Attributes
    ----------
    name : str
        The name by which it was loaded.
    train_x, validation_x, test_x, train_y, validation_y, test_y, classes
        Float32 images [N, C, H, W] or records [N, F], in [0, 1] unless the note says otherwise;
        int64 labels [N]; the classes' names. N may be 0 for the test.
    title, kind, licence, source, note : str
        See `fl_privacy_lib.data.splits.About`; `kind` is 'image' or 'tabular'.
    """

    name: str

    @property
    def example_shape(self) -> tuple[int, ...]:
        """Shape of one example: (C, H, W) or (F,)."""
        return self.train_x.shape[1:]

    @property
    def n_classes(self) -> int:
        """Number of classes."""
        return len(self.classes)


def _is_archive(name: str) -> bool:
    """Return whether name is ``npz:PATH``; `InputError` if it is no known name either."""
    if str(name).startswith(npz.PREFIX):
        return True
    # "npz:PATH" stands among the words, so that the sentence lists everything that is possible.
    one_of([*DATASETS, npz.PREFIX + "PATH"], dataset=name)
    return False


def _absent(name: str, spec: Spec, root: Path) -> InputError:
    """Return the error for files that are not in the data folder: which, where, and what to do."""
    folder = f"the data folder {root}" + ("" if root.is_dir() else ", which does not exist")
    return InputError(
        f"{spec.title} needs {missing(spec.layouts, root)}, not found in {folder}: put it there, "
        "set FL_PRIVACY_DATA to a folder that holds it, or download it with "
        f'fl_privacy_lib.data.fetch("{name}", folder).'
    )


def available(name: str, root: Path | str) -> bool:
    """Return whether the files of a data set are in the data folder, without reading them.

    Parameters
    ----------
    name : str
        A name in `DATASETS`, or ``npz:PATH``.
    root : Path
        The data folder; it need not exist.

    Returns
    -------
    bool
        Always True for what comes with scikit-learn, or is drawn.

    Raises
    ------
    InputError
        If the name is unknown, or the folder is a file or may not be searched.

    Examples
    --------
    >>> available("cancer", Path("/nowhere")), available("mnist", Path("/nowhere"))
    (True, False)
    """
    root = Path(root)
    if _is_archive(name):
        return is_file(npz.path_of(name, root))
    return find(DATASETS[name].layouts, root) is not None


def first_available(names: Sequence[str], root: Path) -> str:
    """Return the first of names whose files are in the data folder; `InputError` if there is none.

    Examples
    --------
    >>> first_available(["mnist", "digits"], Path("/nowhere"))
    'digits'
    """
    for name in names:
        if available(name, root):
            return name
    raise InputError(
        f"None of {', '.join(names) or 'no names'} is in the data folder {root}: set "
        "FL_PRIVACY_DATA to a folder that holds one of them, or name cancer, digits, syn_l or "
        "syn_h, which need no files."
    )


def _check_files(name: str, root: Path) -> tuple[Layout, list[Path], str]:
    """Return the layout that is there, its paths and fingerprint; `InputError` if none is whole."""
    located = find(DATASETS[name].layouts, root)
    if located is None:
        raise _absent(name, DATASETS[name], root)
    layout, files = located
    return layout, [path for path, _ in files], check(files)


def verify(name: str, root: Path | str) -> None:
    """Check in a second or two that a data set can be loaded.

    Parameters
    ----------
    name : str
        A name in `DATASETS`, or ``npz:PATH``.
    root : Path
        The data folder.

    Raises
    ------
    InputError
        If the name is unknown, a file is missing, cannot be read, or has another checksum than the
        published one (of CIFAR-10's Parquet files `load` compares the content); for ``npz:PATH``,
        if anything is malformed in the arrays.
    """
    root = Path(root)
    if _is_archive(name):
        npz.read(npz.path_of(name, root))
    else:
        _check_files(name, root)


def fetch(name: str, root: Path | str) -> None:
    """Download a data set into the data folder, unless its files are there already.

    torchvision (MNIST, CIFAR-10) or scikit-learn (LFW) does it and checks what it gets; the tables
    come from the UCI repository. A server that does not answer for 20 seconds counts as absent.

    Parameters
    ----------
    name : str
        A name in `DATASETS`, or ``npz:PATH``, which cannot be downloaded.
    root : Path
        The data folder; it is made if it does not exist.

    Raises
    ------
    InputError
        If the name is unknown, or the files are not there and cannot be had.
    """
    root = Path(root)
    if available(name, root):
        return
    if _is_archive(name):
        return verify(name, root)
    spec = DATASETS[name]
    if spec.fetch:
        with network(spec.title, missing(spec.layouts, root), root):
            spec.fetch(root)
    if not available(name, root):
        raise _absent(name, spec, root)


def load(name: str, root: Path | str, cache: Path | None = None) -> Dataset:
    """Load a data set from the data folder, downloading it first if it is not there.

    Parameters
    ----------
    name : str
        A name in `DATASETS`, or ``npz:PATH`` for one's own images (see `fl_privacy_lib.data.npz`);
        a relative PATH is meant from the data folder.
    root : Path
        The data folder.
    cache : Path or None
        Where decoded arrays are kept for the next time, uncompressed, one file for each state of
        the source. None: decode each time.

    Returns
    -------
    Dataset

    Raises
    ------
    InputError
        As `verify` and `fetch`; for ``npz:PATH`` also for anything malformed in the arrays.

    Examples
    --------
    >>> cancer = load("cancer", Path("/nowhere"))
    >>> cancer.train_x.shape, cancer.validation_x.shape, cancer.classes
    ((426, 30), (143, 30), ('malignant', 'benign'))
    """
    root = Path(root)
    if _is_archive(name):
        return _load_archive(name, npz.path_of(name, root))
    fetch(name, root)
    spec = DATASETS[name]
    layout, paths, fingerprint = _check_files(name, root)
    # What comes with a library is decoded faster than read back, and no file names its cache.
    arrays = cached(
        cache if paths else None,
        f"{name}-{fingerprint[:16]}",
        lambda: layout.decode(paths),
    )
    return Dataset(
        name=name,
        title=spec.title,
        kind=spec.kind,
        **vars(spec.build(arrays)),
        licence=spec.licence,
        source=spec.source,
        note=" ".join(filter(None, [spec.note, layout.note])),
    )


def _load_archive(name: str, path: Path) -> Dataset:
    """Load ``npz:PATH``; the last fifth of the training images validates."""
    arrays = npz.read(path)
    x, y = arrays["train_images"], arrays["train_labels"]
    cut = len(y) - len(y) // 5
    classes = tuple(str(label) for label in range(int(y.max()) + 1))
    parts = Parts(
        x[:cut], y[:cut], x[cut:], y[cut:], arrays["test_images"], arrays["test_labels"], classes
    )
    return Dataset(
        name=name,
        title=f"own data ({path.stem})",
        kind="image",
        **vars(parts),
        licence="as its owner says",
        source=path.name,
        note=f"{cut:,} images for training; the last fifth of train_images, {len(y) - cut:,}, "
        f"validates; {len(arrays['test_labels']):,} test images.",
    )
