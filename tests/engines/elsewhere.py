"""An engine in another environment: of another version of vLLM, or of kvferry.

It answers as `serving.Server` does, but its process is started with that environment's Python instead of
being forked from this one.
"""

import multiprocessing.connection
import os
import subprocess
import sys
from pathlib import Path

import environment


def server(python, model, role, **options):
    # Here, because the process that serves does not need it, and has its own vLLM to import.
    from serving import Server

    class Elsewhere(Server):
        def __init__(self):
            self._pipe, theirs = multiprocessing.connection.Pipe()
            self._process = _Process(python, theirs)
            theirs.close()
            self._pipe.send((model, role, options))
            self.ask("ready")

        def ask(self, *question):
            try:
                return super().ask(*question)
            except EOFError:
                raise AssertionError(f"the engine of {python} ended before it answered") from None

    return Elsewhere()


class _Process:
    """A process with as much of `multiprocessing.Process` as `Server` asks for."""

    def __init__(self, python, pipe):
        here = Path(__file__)
        users = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
        self._running = subprocess.Popen(
            [python, here, str(pipe.fileno())], cwd=here.parent, env=users, pass_fds=[pipe.fileno()]
        )
        self.pid = self._running.pid

    def is_alive(self):
        return self._running.poll() is None

    def kill(self):
        self._running.kill()

    def join(self, timeout=None):
        try:
            self._running.wait(timeout)
        except subprocess.TimeoutExpired:
            return


def main():
    environment.forked(os.environ)
    pipe = multiprocessing.connection.Connection(int(sys.argv[1]))
    import serving

    model, role, options = pipe.recv()
    serving._serve(pipe, model, role, options)


if __name__ == "__main__":
    main()
