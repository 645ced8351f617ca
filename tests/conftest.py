"""Shared fixtures: the real data, which CI may not skip for want of; double precision; the book."""

import functools
import http.server
import os
import shutil
import threading
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from site_scenes import noting_tab, pages_of

from fl_privacy_lib.chapters import CHAPTERS
from fl_privacy_lib.data import load
from fl_privacy_lib.reproduction import book

torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)  # before -m chooses by the marks
def pytest_collection_modifyitems(items):
    """Mark what needs the built book as long; put the longest module first, as one process runs it
    while the other has all the rest.
    """
    for item in items:
        if "site" in item.fixturenames:
            item.add_marker(pytest.mark.long)
    items.sort(key=lambda item: item.path.name != "test_site.py")


@pytest.fixture(scope="session")
def data_root() -> Path:
    """Return the folder of real data sets, or skip (in CI with a data folder named: fail)."""
    named = os.environ.get("FL_PRIVACY_DATA")
    if named and Path(named).is_dir():
        return Path(named).resolve()
    reason = f"real data sets: set FL_PRIVACY_DATA to a folder that holds them (now {named!r})"
    if os.environ.get("CI") and named:
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture
def double():
    """Compute in float64: rounding over many steps then stays far below what a test asks for."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def real(data_root, tmp_path_factory):
    """Load a real data set once a module, through a cache in a temporary folder."""
    cache, held = tmp_path_factory.mktemp("cache"), {}

    def get(name):
        if name not in held:
            held[name] = load(name, data_root, cache)
        return held[name]

    yield get
    held.clear()


# ---- the built book, alone and in a browser ----------------------------------------------------

FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()


@pytest.fixture(scope="session")
def site() -> Path:
    """Return the folder of the built book; build it at the smoke profile if a page is missing."""
    book.BUILD.mkdir(exist_ok=True)
    with FileLock(book.BUILD / "site.lock"):  # of several test processes one builds it
        if not all((book.HTML / name).exists() for name in ("index.html", *pages_of())):
            book.build(CHAPTERS, "smoke")
    return book.HTML


@pytest.fixture(scope="session")
def browser():
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("browser tests need Debian's chromium: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def address(site):
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture
def page(browser, address):
    with noting_tab(browser, address) as tab:
        yield tab
