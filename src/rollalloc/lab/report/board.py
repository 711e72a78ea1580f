"""The live board: a local, read-only web page of all runs in a folder; reports are redrawn when files change."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from operator import is_
from pathlib import Path

from markupsafe import Markup

from rollalloc.lab.report.page import POLICY, render, sections, title_of
from rollalloc.runs.discovery import comparisons
from rollalloc.runs.reader import Reader
from rollalloc.runs.recorded import RecordedRun, unshown

HOST = "127.0.0.1"
_NAMES = re.compile(
    r"(127\.0\.0\.1|localhost)(:\d+)?"
)  # against DNS rebinding: other sites must not reach the board under their own host name
_BYTES = 32 << 20  # of metrics read per page, a second or two; the next page reads on
_REFRESH_S = 3  # seconds between reloads of the overview while a run trains
_REFRESH_REPORT_S = 15  # the same for a report, whose figures take seconds to draw


@dataclass(frozen=True)
class Entry:
    """A comparison on the board: the address of its report, and an HTML row for each of its runs."""

    address: str
    name: str
    rows: Sequence[Markup]


class BoardPages:
    """The pages for a folder of runs, at any depth that `comparisons` searches; the folder need not exist yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._reader = Reader(_BYTES)
        self._reports: dict[Path, _Report] = {}
        self._lock = threading.Lock()

    def page(self, address: str) -> str | None:
        """The page at an address, or None. An address is looked up among the runs found; it is never used as a path."""
        with self._lock:
            runs_of, why = self._found()
            places = {_address(place): place for place in runs_of}
            if address == "/":
                return self._overview({at: runs_of[place] for at, place in places.items()}, why)
            if address not in places:
                return None
            place = places[address]
            if place not in self._reports:
                self._reports[place] = _Report(place)
            return self._reports[place].page(runs_of[place])

    def _found(self) -> tuple[dict[Path, list[RecordedRun]], str | None]:
        """The current runs by the folder that holds them, and the reason if the folder cannot be read."""
        self._reader.allowance = _BYTES
        why = None
        try:
            runs_of = comparisons(self.folder, self._reader)
        except FileNotFoundError:
            runs_of = {}
        except OSError as error:
            runs_of, why = {}, f"{type(error).__name__}: {error}"
        self._reader.keep(run.folder for of_one in runs_of.values() for run in of_one)
        self._reports = {place: report for place, report in self._reports.items() if place in runs_of}
        return runs_of, why

    def _overview(self, runs: dict[str, list[RecordedRun]], why: str | None) -> str:
        entries = [
            Entry(address, _name(self.folder, of_one), [_row(run) for run in sorted(of_one, key=_is_over)])
            for address, of_one in sorted(runs.items(), key=lambda entry: all(map(_is_over, entry[1])))
        ]
        live = not entries or any(run.why is None or run.unread for of_one in runs.values() for run in of_one)
        title = f"rollalloc: runs in {self.folder.absolute()}"
        return render("board.html.j2", refresh=_REFRESH_S if live else None, title=title, entries=entries, why=why)


def _is_over(run: RecordedRun) -> bool:
    """Sort key: running before ended; otherwise the order stays."""
    return run.why is not None


def _row(run: RecordedRun) -> Markup:
    """A run's row; if it cannot be drawn, the row says so, and the other runs are unaffected."""
    try:
        return Markup(render("row.html.j2", run=run))
    except Exception as error:  # whatever a file holds
        return Markup(render("row.html.j2", run=unshown(run, error)))


class _Report:
    """A report drawn in the background, since that takes seconds; meanwhile requests get the previous one."""

    _one_at_a_time = threading.Lock()  # matplotlib's style is global

    def __init__(self, place: Path) -> None:
        self._place = place
        self._page = render("drawing.html.j2", refresh=1, title="drawing the report")
        self._shows: Sequence[RecordedRun] = ()  # the runs in the state that is drawn, or being drawn
        self._drawing: threading.Thread | None = None

    def page(self, runs: Sequence[RecordedRun]) -> str:
        """The newest finished page."""
        if unread := sum(run.unread for run in runs):
            why = f"The runs are being read, {unread / 1e6:,.0f} MB are left."
            return render("drawing.html.j2", refresh=1, title="reading the runs", why=why)
        same = len(runs) == len(self._shows) and all(map(is_, runs, self._shows))
        if not same and not (self._drawing and self._drawing.is_alive()):
            self._shows = list(runs)  # a Reader returns the same object while the files are unchanged
            self._drawing = threading.Thread(target=self._draw, args=(self._shows,), daemon=True)
            self._drawing.start()
        return self._page

    def _draw(self, runs: Sequence[RecordedRun]) -> None:
        refresh = _REFRESH_REPORT_S if any(run.why is None for run in runs) else None
        with self._one_at_a_time:
            try:
                drawn = sections({self._place: runs}, self._place)
                self._page = render("report.html.j2", refresh=refresh, title=title_of(drawn), sections=drawn)
            except Exception as error:  # a file may hold anything: show the error and go on
                why = f"{type(error).__name__}: {error}"
                self._page = render("drawing.html.j2", refresh=_REFRESH_REPORT_S, title="no report", why=why)


def serve(folder: Path, port: int = 0) -> ThreadingHTTPServer:
    """A server of the board on this machine only, not yet started; port 0 takes a free one.

    Raises:
        OSError: the port is taken.
    """
    board = BoardPages(folder)

    class Handler(_Handler):
        pages = board

    return ThreadingHTTPServer((HOST, port), Handler)


class _Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD for the board's pages, nothing else."""

    pages: BoardPages
    timeout = 10  # seconds until a silent connection gives up its thread

    def do_GET(self) -> None:
        if not _NAMES.fullmatch(self.headers.get("Host", "")):
            self._answer(HTTPStatus.MISDIRECTED_REQUEST, f"ask for {HOST}, not for another name of it")
            return
        page = self.pages.page(self.path.partition("?")[0])
        if page is None:
            self._answer(HTTPStatus.NOT_FOUND, "there is no such page; the board is at /")
        else:
            self._answer(HTTPStatus.OK, page, "text/html")

    do_HEAD = do_GET

    def _refuse(self) -> None:
        self._answer(HTTPStatus.METHOD_NOT_ALLOWED, "the board can be read, not written")

    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = do_CONNECT = _refuse

    def _answer(self, status: HTTPStatus, text: str, kind: str = "text/plain") -> None:
        body = text.encode("utf-8", errors="replace")
        self.send_response(status)
        for name, value in (
            ("Content-Type", f"{kind}; charset=utf-8"),
            ("Content-Length", str(len(body))),
            ("Content-Security-Policy", f"{POLICY}; frame-ancestors 'none'"),
            ("X-Content-Type-Options", "nosniff"),
            ("Referrer-Policy", "no-referrer"),
            ("Cache-Control", "no-store"),
            *([("Allow", "GET, HEAD")] if status == HTTPStatus.METHOD_NOT_ALLOWED else []),
        ):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            with suppress(ConnectionError):  # the browser has left the page
                self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: the terminal shows the address."""


def _address(place: Path) -> str:
    """An address that stays the same when other runs begin, and reveals nothing of the file system."""
    return f"/{sha256(str(place).encode(errors='surrogateescape')).hexdigest()[:12]}"


def _name(folder: Path, runs: Sequence[RecordedRun]) -> str:
    place = runs[0].folder if len(runs) == 1 else runs[0].folder.parent
    return str(place.relative_to(folder)) if place != folder else folder.absolute().name  # the name of "." is empty
