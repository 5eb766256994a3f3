"""The commands: their arguments, their help, and how errors come out."""

from __future__ import annotations

import difflib
import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from safeckpt.cli.screen import Screen, error_line, write, write_json
from safeckpt.errors import SafeckptError, listed
from safeckpt.system.text import printable

__all__ = ["run"]

_EPILOG = """\
\b
Exit codes:
  0  done, and the answer is yes
  1  the answer is no: no good checkpoint (latest, best, fetch), not all good
     (verify), different (diff), not exact (prove), not safe (doctor),
     nothing to draw (plot)
  2  no answer: usage, no such file, a damaged file that had to be read,
     a directory that is held, no package

All commands work while a training run holds the directory, but for prune, fetch and import, which need it for
themselves. A directory or a checkpoint may be the URL of one in an object store.

\b
Completion for bash (or zsh_source, fish_source), in its start file:
  eval "$(_SAFECKPT_COMPLETE=bash_source safeckpt)"
"""

_LIST_EXAMPLES = """\
\b
Examples:
  safeckpt list runs/* --sort val
  safeckpt list runs/a --where 'metric.acc>0.9' --where 'step>=1000'
  safeckpt list runs/a --where 'saved<2026-11-30T18:00' --sort loss
"""

_IMPORT_EXAMPLES = """\
\b
Examples:
  safeckpt import old.pt runs/a --map model=net --map optimizer=opt --step 9
  safeckpt import last.ckpt runs/a --map model=state_dict \\
      --map optimizer=optimizer_states.0
  safeckpt import output/checkpoint-500 runs/a
"""

_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


class _PathOrURL(click.Path):
    """A path that is there, or the URL of something in a store."""

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        from safeckpt.remote.urls import is_url

        if is_url(value):
            return _checked_url(value, parameter)
        if not os.path.lexists(value):
            self.fail(f"{value} does not exist.{_instead_of(Path(value))}", parameter, context)
        return super().convert(value, parameter, context)


def _checked_url(url: str, parameter: click.Parameter | None = None) -> str:
    """Refuse a URL that no package here can use; no request is made."""
    from safeckpt.remote import open_prefix

    try:
        open_prefix(url)
    except (ValueError, ImportError) as error:
        raise click.BadParameter(str(error), param=parameter) from None
    return url


def _instead_of(path: Path) -> str:
    """Return what there is where a path was looked for, as a sentence; empty when it is nothing like it."""
    from safeckpt.store import CheckpointDirectory

    parent = path.parent
    if not parent.is_dir():
        return ""
    if steps := CheckpointDirectory(parent).steps():
        return f" {parent} has step {listed(steps[::-1])}; `safeckpt list {parent}` shows the names."
    near = difflib.get_close_matches(path.name, [one.name for one in parent.iterdir()], n=3)
    return f" There is {', '.join(str(parent / name) for name in near)}." if near else ""


def _picture(_: click.Context, __: click.Parameter, path: str | None) -> str | None:
    """Refuse a picture of another kind before the work for it is done."""
    from safeckpt.system.figures import ENDINGS

    if path is not None and Path(path).suffix.lower() not in ENDINGS:
        raise click.BadParameter(f"{path} has to end in {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}.")
    return path


_directory = click.argument("directory", type=_PathOrURL(exists=True, file_okay=False))
_directories = click.argument(
    "directories", nargs=-1, required=True, type=_PathOrURL(exists=True, file_okay=False), metavar="DIRECTORY..."
)


def _file(name: str) -> Callable[[Any], Any]:
    return click.argument(name, type=_PathOrURL(exists=True), callback=_one_checkpoint)


def _one_checkpoint(_: click.Context, __: click.Parameter, path: str) -> str:
    """Refuse a directory that is not itself a checkpoint."""
    from safeckpt.cli.verification import refuse_shard
    from safeckpt.file import is_folder
    from safeckpt.remote.urls import is_url

    if is_url(path):
        return path
    refuse_shard(Path(path))
    if Path(path).is_dir() and not is_folder(path):
        raise click.BadParameter(f"{path} is a directory; name one checkpoint, `safeckpt list {path}` shows them.")
    return path


def run(arguments: Sequence[str]) -> int:
    """Run a command; errors are printed as text, without a traceback."""
    try:
        with Screen(as_json=False).warnings_as_lines():
            code = group.main(list(arguments), prog_name="safeckpt", standalone_mode=False)
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.ClickException as error:
        text = io.StringIO()
        error.show(text)
        sys.stderr.write(printable(text.getvalue()))
        return 2
    except click.Abort:
        error_line("Aborted; nothing was changed.")
        return 2
    except SafeckptError as error:
        error_line("\n".join([str(error), *getattr(error, "__notes__", ())]))
        return 2
    except OSError as error:
        error_line(str(error) if error.filename is None else f"{error.filename}: {error.strerror}")
        return 2
    except BaseException as error:  # a fault of ours: by itself Python would end with 1, which is an answer
        if not isinstance(error, Exception):
            raise
        _print_traceback(error)
        error_line("that is a fault of safeckpt; nothing is known about the file.")
        return 2
    return code if isinstance(code, int) else 0


def _print_traceback(error: Exception) -> None:
    """Print where an error comes from that nobody has foreseen."""
    sys.stderr.write(printable("".join(traceback.format_exception(error))))


def _print_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        import safeckpt

        write(f"safeckpt {safeckpt.__version__}")
        context.exit()


@click.group(epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Print the version."
)
def group() -> None:
    """Checkpoints that come back as the same run: look at them, check them, prove them."""


@group.command(
    short_help="The library at work, in a minute.",
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def demo(arguments: tuple[str, ...]) -> int:
    """Train, kill, resume, poison, roll back: the library at work, in a minute."""
    from safeckpt.demo import main

    return main(list(arguments))


@group.command("list", short_help="List the checkpoints in directories.", epilog=_LIST_EXAMPLES)
@_directories
@click.option("--sort", metavar="KEY[:max]", help="The lowest first; with :max the highest.")
@click.option("--where", multiple=True, metavar="KEY<VALUE", help="Only those for which it holds; may be repeated.")
@_json
def list_(directories: tuple[str, ...], sort: str | None, where: tuple[str, ...], *, as_json: bool) -> int:
    """List the checkpoints in DIRECTORIES.

    The check is the cheap one: name, trailer, size, structure. `verify` reads every byte, so in --json "good" is false
    for what is known to be damaged, and else null.

    KEY is step, saved, size, run, loss, metric.NAME or note.NAME, or just the NAME of a metric. --where compares it
    with < <= > >= = or !=, and what has no such value is left out. A size is a number of bytes or 5GB, a time is UTC.
    """
    from safeckpt.cli.listing import list_directories
    from safeckpt.cli.selection import Selection, parse_condition

    selection = Selection([parse_condition(text) for text in where], sort)
    return list_directories(Screen(as_json=as_json), directories, selection)


@group.command(short_help="Show what is in a file.")
@_file("file")
@click.option("--all", "everything", is_flag=True, help="Print every value, plain ones too.")
@_json
def show(file: str, *, everything: bool, as_json: bool) -> int:
    """Show what is in FILE: components, tensors, loss, metrics, environment."""
    from safeckpt.cli.showing import show_file

    return show_file(Screen(as_json=as_json), file, everything=everything)


@group.command(short_help="Check every byte of files and directories.")
@click.argument("paths", nargs=-1, required=True, type=_PathOrURL(exists=True), metavar="PATH...")
@click.option("--last", type=click.IntRange(min=1), help="Of a directory only the newest so many.")
@_json
def verify(paths: tuple[str, ...], last: int | None, *, as_json: bool) -> int:
    """Check every byte of files, and of all checkpoints in directories.

    Exit code 1 when one of them is not good, or a directory has none.
    """
    from safeckpt.cli.verification import verify_paths

    return verify_paths(Screen(as_json=as_json), paths, last)


@group.command("diff", short_help="Compare two checkpoints, bit for bit.")
@_file("a")
@_file("b")
@click.argument("components", nargs=-1, metavar="[COMPONENT]...")
@click.option("--all", "everything", is_flag=True, help="Print every difference, not the first 30.")
@_json
def diff_(a: str, b: str, components: tuple[str, ...], *, everything: bool, as_json: bool) -> int:
    """Compare the checkpoints A and B, bit for bit, or only the COMPONENTs that are named, such as model.

    The largest change of a tensor is that of one element; relative is that change as a share of the largest element
    of A. That of a component is of its tensors with more than one element, where some of them have changed. Exit code 1
    when anything differs, 2 when one of the files is damaged.
    """
    from safeckpt.cli.changes import diff

    return diff(Screen(as_json=as_json), a, b, components, everything=everything)


@group.command(short_help="Print the path of the newest good checkpoint.")
@_directory
@_json
def latest(directory: str, *, as_json: bool) -> int:
    """Print the path of the newest good checkpoint in DIRECTORY, every byte of it verified.

    A newer one that is not good is passed over with a warning: whether there is one, `verify --last 1` says. Exit code
    1 when no checkpoint is good.
    """
    from safeckpt.cli.listing import print_latest

    return print_latest(Screen(as_json=as_json), directory)


@group.command(short_help="Print the path of the best good checkpoint.")
@_directory
@click.argument("metric", required=False, metavar="[METRIC[:max]]")
@_json
def best(directory: str, metric: str | None, *, as_json: bool) -> int:
    """Print the path of the good checkpoint in DIRECTORY with the best METRIC, every byte of it verified.

    METRIC is a name that was given to save(metrics=...), or loss. The lowest value is the best, with :max the highest.
    Without METRIC it is that of the run's keep_best. Exit code 1 when no good checkpoint has a finite value.
    """
    from safeckpt.cli.listing import print_best

    return print_best(Screen(as_json=as_json), directory, metric)


@group.command(short_help="Print the history of a directory.")
@_directory
@click.option("--last", type=click.IntRange(min=0), help="Only the last so many events.")
@_json
def log(directory: str, last: int | None, *, as_json: bool) -> int:
    """Print the history of DIRECTORY: saved, refused, restored, rolled back."""
    from safeckpt.cli.listing import show_log

    return show_log(Screen(as_json=as_json), directory, last)


@group.command("plot", short_help="Draw the losses of runs, and what happened.")
@_directories
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False),
    callback=_picture,
    help="A .png, .svg or .pdf file. [safeckpt-NAME.png in the current directory]",
)
@_json
def plot_(directories: tuple[str, ...], output: str | None, *, as_json: bool) -> int:
    """Draw the losses of the runs in DIRECTORIES over their steps into a file, and print its path.

    Below the losses: which steps were saved, refused, rolled back and restored, and which losses were computed again.
    Needs the package matplotlib and no display. Exit code 1 when there is nothing to draw.
    """
    from safeckpt.cli.drawing import plot_runs

    return plot_runs(Screen(as_json=as_json), directories, output)


@group.command("prune", short_help="Delete old checkpoints in a directory.")
@_directory
@click.option("--keep-last", type=click.IntRange(min=1), required=True, help="Newest checkpoints to keep.")
@click.option(
    "--keep-every",
    metavar="STEPS|TIME",
    help="Keep multiples of this step; with 30m, 6h or 1d the newest of each such period.",
)
@click.option(
    "--keep-best",
    multiple=True,
    metavar="METRIC[:max]",
    help="Keep the best one for a metric. [those that the run keeps]",
)
@click.option("--no-keep-best", is_flag=True, help="Keep no best one.")
@click.option("--dry-run", is_flag=True, help="Only say what would be deleted.")
@click.option("--yes", is_flag=True, help="Do not ask. --json does not ask either.")
@_json
def prune_(
    directory: str,
    keep_last: int,
    keep_every: str | None,
    keep_best: tuple[str, ...],
    *,
    no_keep_best: bool,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> int:
    """Delete old checkpoints in DIRECTORY.

    Every checkpoint that stays for being one of the last is verified first; damaged ones are never deleted and never
    count. Of the run's own rules only keep_best is known here: give --keep-every again. Takes the writer lock, so it
    is refused while a training run holds the directory (--dry-run is not).
    """
    from safeckpt.cli.pruning import prune

    if keep_best and no_keep_best:
        raise click.UsageError("--keep-best and --no-keep-best contradict each other")
    return prune(
        Screen(as_json=as_json), directory, keep_last=keep_last, keep_every=keep_every,
        keep_best=keep_best if keep_best or no_keep_best else None, dry_run=dry_run, yes=yes or as_json,
    )  # fmt: skip


@group.command("fetch", short_help="Bring a checkpoint from an object store.")
@click.argument("url")
@click.argument("directory", type=click.Path(file_okay=False))
@click.option("--step", type=click.IntRange(min=0), help="This one instead of the newest good one.")
@_json
def fetch_(url: str, directory: str, step: int | None, *, as_json: bool) -> int:
    """Bring the newest good checkpoint of a mirror at URL into DIRECTORY, every byte of it verified.

    Takes the writer lock of DIRECTORY. A manager with mirror= does the same by itself when it restores. Exit code 1
    when there is none.
    """
    from safeckpt.cli.stores import fetch_one
    from safeckpt.remote.urls import is_url

    if not is_url(url):
        raise click.UsageError(f"{url} is no URL, such as s3://bucket/runs/x.")
    return fetch_one(Screen(as_json=as_json), _checked_url(url), directory, step)


@group.command(short_help="Try whether checkpoints are safe in a place.")
@_directory
@_json
def doctor(directory: str, *, as_json: bool) -> int:
    """Try in DIRECTORY, or at the URL of a store, what checkpoints rest on.

    Syncs, renames, exclusive creation, locks between processes, the kind of file system, room and limits; of a store
    its conditional writes. Everything is really done, with a folder that is removed again. Exit code 1 when something
    does not hold: then a crash, a reboot or a second job may cost checkpoints there.
    """
    from safeckpt.cli.diagnosis import diagnose

    return diagnose(Screen(as_json=as_json), directory)


@group.command("import", short_help="Go on with a half-finished run of another tool.", epilog=_IMPORT_EXAMPLES)
@click.argument("source", type=_PathOrURL(exists=True))
@click.argument("directory", type=click.Path(file_okay=False))
@click.option("--map", "pairs", multiple=True, metavar="NAME=KEY", help="A component and its key; may be repeated.")
@click.option("--step", type=click.IntRange(min=0), help="Optimizer steps completed. [what SOURCE says]")
@_json
def import_(source: str, directory: str, *, pairs: tuple[str, ...], step: int | None, as_json: bool) -> int:
    """Make SOURCE the first checkpoint of a run in DIRECTORY.

    SOURCE is a file of torch.save, a .ckpt of Lightning, a folder checkpoint-N of Hugging Face's Trainer, or one of
    Accelerate's save_state. Keys have dots for keys within keys and numbers for entries of lists.
    """
    from safeckpt.cli.importing import import_run

    return import_run(Screen(as_json=as_json), source, directory, pairs=pairs, step=step)


@group.command("extract", short_help="Write one component into a file of its own.")
@_file("file")
@click.argument("component")
@click.option("-o", "--output", required=True, type=click.Path(dir_okay=False), help="A .pt or .safetensors file.")
@click.option("--dtype", help="Convert floating tensors: bf16, fp16, fp32.")
@click.option("--max-shard-size", metavar="SIZE", help="Several .safetensors files and an index beyond it: 5GB.")
@click.option("--force", is_flag=True, help="Replace a file that is there.")
@_json
def extract_(
    file: str, component: str, output: str, *, dtype: str | None, max_shard_size: str | None, force: bool, as_json: bool
) -> int:
    """Write one COMPONENT of FILE, for example model, into a file of its own."""
    from safeckpt.cli.extraction import extract

    return extract(
        Screen(as_json=as_json), file, component, output, dtype=dtype, max_shard_size=max_shard_size, force=force
    )


@group.command()
@click.argument("target", metavar="MODULE:FUNCTION")
@click.option("--steps", type=click.IntRange(min=1), default=20, show_default=True, help="Length of the run.")
@click.option("--kill-at", type=click.IntRange(min=0), multiple=True, help="Step of the kill; may be repeated. [10]")
@click.option("--repeats", type=click.IntRange(min=1), default=2, show_default=True, help="Uninterrupted runs.")
@click.option("--ablate", is_flag=True, help="Also leave out one component at a time.")
@click.option("--train-step", metavar="NAME", help="The step function in MODULE. [train_step]")
@click.option("--in-process", is_flag=True, help="No fresh processes and no real kill.")
@click.option(
    "--plot", type=click.Path(dir_okay=False), callback=_picture, help="Draw both curves into this .png, .svg or .pdf."
)
@_json
def prove(
    target: str,
    *,
    steps: int,
    kill_at: tuple[int, ...],
    repeats: int,
    train_step: str | None,
    plot: str | None,
    ablate: bool,
    in_process: bool,
    as_json: bool,
) -> int:
    """Prove that a run resumes as the same run, bit for bit.

    MODULE is a file or a dotted name. FUNCTION is build(), which returns the components; the module's
    train_step(components) does one step and returns the loss. Without such a function in the module, FUNCTION() is
    called and returns (build, train_step). FUNCTION(directory) is one that trains a whole run there, with a manager of
    its own or a trainer.

    Exit code 1 when the resumed losses are not exactly those of the uninterrupted run.
    """
    from safeckpt.cli.target import TargetError, of_single_steps, resolve
    from safeckpt.proof import prove_resume

    screen = Screen(as_json=as_json)
    kills = list(kill_at) or [min(10, steps - 1)]
    if max(kills) >= steps:
        raise click.UsageError(f"--kill-at has to be below --steps, {steps}; got {max(kills)}")
    with screen.status("importing") as status:
        try:
            build, step = resolve(target, train_step)
            more = of_single_steps(step, ablate=ablate, in_process=in_process)
            report = prove_resume(build, step, steps=steps, kill_at=kills, repeats=repeats, progress=status, **more)  # type: ignore[arg-type]  # or for a whole run None
        except TargetError as error:
            raise click.UsageError(str(error)) from None
        except SafeckptError:
            raise
        except BaseException as error:  # what the user's code raises must not look like the answer "not exact"
            if not isinstance(error, Exception):
                raise
            _print_traceback(error)
            return 2
    if plot is not None:
        try:
            report.plot(plot)
        except ImportError as error:
            raise click.ClickException(str(error)) from None
    write_json(report.to_json()) if as_json else screen.verdict(str(report), good=report.exact)
    return 0 if report.exact else 1
