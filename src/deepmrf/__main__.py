"""The program `deepmrf`, also as `python -m deepmrf`."""

import signal


def main() -> None:
    """Run the command line. Before and after a command, Ctrl-C shows no traceback of imports or of PyTorch's end."""
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # and not ignored, as in background jobs
    if usual:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from deepmrf.cli import app

    if usual:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        app(prog_name="deepmrf")
    except KeyboardInterrupt:  # before the command began
        raise SystemExit(130) from None
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


if __name__ == "__main__":
    main()
