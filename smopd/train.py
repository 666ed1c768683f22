"""`smopd train [RECIPE]`: train the runs of a recipe. Validates the settings before importing torch."""

import gc
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from types import FrameType

from smopd import extra  # noqa: F401 reports missing packages

# isort: split
from smopd.config.cli import PARENT, describe, parse
from smopd.config.settings import Model
from smopd.data.places import located
from smopd.engine import process

GPU_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
END_SECONDS = 30.0
"""Time in which the other ranks must end once a rank has failed."""


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    if argv is None:  # so that Ctrl-C prints no traceback before Stop handles it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if PARENT in os.environ:  # so that no rank outlives `launch`
        process.die_with_parent(int(os.environ[PARENT]))
    command = parse(arguments)
    if command.dry_run:
        print(describe(command), flush=True)
        if command.show_settings:
            return 0
        if not on_this_machine(command.settings.model):
            print(f"the rewards were not tried: {command.settings.model.path} is not on this machine")
            return 0
        from smopd.run.pipeline import try_recipe

        return try_recipe(command)
    if command.settings.processes > 1 and "RANK" not in os.environ:  # this process is not a rank
        return launch(arguments, command.settings.processes)
    if argv is None:
        gc.disable()  # saves a second: imports make no garbage
    from smopd.run.pipeline import run_recipe

    if argv is None:
        gc.freeze()  # collections that skip the modules take a third of a second less
        gc.enable()
    if PARENT in os.environ and "WORLD_SIZE" in os.environ:  # `launch` may have started fewer ranks
        started = {"processes": int(os.environ["WORLD_SIZE"])}
        command = replace(command, settings=command.settings.model_copy(update=started))
    return run_recipe(command)


def on_this_machine(model: Model) -> bool:
    """Return whether the model comes from a factory, is in a folder, or is in the hub's cache."""
    from huggingface_hub import try_to_load_from_cache

    try:
        folder = model.factory is not None or located(str(model.path)).exists()
        return folder or isinstance(try_to_load_from_cache(str(model.path), "config.json"), str)
    except (OSError, ValueError):  # the path is a short name without data, or not a hub id
        return False


def launch(arguments: list[str], processes: int) -> int:
    """Run the command in `processes` local ranks, but at most one per GPU. Return the exit status.

    torchrun's agent does the same, but it needs seconds to import torch.
    """
    if any(map(os.path.exists, GPU_DRIVERS)):
        import torch

        if 0 < (gpus := torch.cuda.device_count()) < processes:
            print(f"starting {gpus} processes, one per GPU, instead of {processes}", flush=True)
            processes = gpus
    come: list[tuple[int, float]] = []
    ranks: list[subprocess.Popen[bytes]] = []

    def hand_on(number: int, frame: FrameType | None) -> None:
        again, now = bool(come), time.monotonic()
        if again and now - come[0][1] < process.SAME_SECONDS:
            return
        come.append((number, now))
        for each in ranks:
            each.send_signal(signal.SIGKILL if again else signal.SIGTERM)

    for number in process.stop_signals():
        signal.signal(number, hand_on)
    with socket.socket() as held:  # bound but not listening, so that nobody else gets the port before rank 0
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        port = held.getsockname()[1]
        if not sys.platform.startswith("linux"):
            held.close()  # outside Linux, rank 0 could not bind a held port
        shared = {
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // processes)),
            **os.environ,
            PARENT: str(os.getpid()),
            "WORLD_SIZE": str(processes),
            "LOCAL_WORLD_SIZE": str(processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        words = [sys.executable, "-m", "smopd.train", *arguments]
        for rank in range(processes):
            own = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(subprocess.Popen(words, env=own, start_new_session=True))
        if come:  # a signal came meanwhile
            for each in ranks:
                each.terminate()
        failed, since = 0, 0.0
        while running := [each for each in ranks if each.poll() is None]:
            if not failed and (failed := next((code for each in ranks if (code := each.returncode)), 0)):
                since = time.monotonic()
                for each in running:
                    each.terminate()
            elif failed and time.monotonic() - since > END_SECONDS:
                for each in running:
                    each.kill()
            time.sleep(0.1)
    code = failed or next((code for each in ranks if (code := each.returncode)), 0)
    return 128 + come[0][0] if come and code else code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
