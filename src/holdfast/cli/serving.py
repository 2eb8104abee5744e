"""`holdfast serve`: the viewer."""

from __future__ import annotations

import ipaddress

import click

from holdfast.cli.app import App, command, needing
from holdfast.errors import InvalidRequest


@command("serve")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen at.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=7460, show_default=True,
    help="The port; 0 for one that is free.",
)  # fmt: skip
@click.option("--read-only", is_flag=True, help="Let nobody change anything.")
@click.option(
    "--auth-token", metavar="TOKEN", envvar="HOLDFAST_AUTH_TOKEN", show_envvar=True,
    help="What every request must bring; else one is made up for this time.",
)  # fmt: skip
@click.option(
    "--allow-host", metavar="NAME", multiple=True,
    help="A name under which others reach this machine.",
)  # fmt: skip
@click.option("--open/--no-open", "show", default=False, help="Open a browser.")
def serve_(
    app: App,
    host: str,
    port: int,
    auth_token: str | None,
    allow_host: tuple[str, ...],
    *,
    read_only: bool,
    show: bool,
) -> None:
    """Look at the store in a browser: sessions, timelines, what changed and what it cost.

    Only this machine can reach it, and only with the address that is printed. Anywhere else than
    at a loopback address it starts with an --auth-token alone.
    """
    with needing("web"):
        from holdfast.web import LOOPBACK, serving
        from holdfast.web import app as viewer
    if not _is_loopback(host) and not auth_token:
        raise InvalidRequest(
            f"{host} can be reached by others", hint="give an --auth-token of your own"
        )
    if auth_token is not None and len(auth_token) < 16:
        raise InvalidRequest("an --auth-token needs at least 16 characters")
    from secrets import token_urlsafe
    from urllib.parse import quote

    token = auth_token or token_urlsafe(24)
    with app.store(write=not read_only) as store, serving.listen(host, port) as sock:
        name = f"[{host}]" if ":" in host else host
        address = f"http://{name}:{sock.getsockname()[1]}/"
        url = f"{address}?token={quote(token, safe='')}"
        if app.json:
            app.emit({"url": url, "read_only": read_only})
        else:
            app.say(url)
            app.note("Whoever has this address can look. Ctrl-C ends it.")
        if show:
            click.launch(url)
        hosts = (*LOOPBACK, host, *allow_host)
        made = viewer(store, token=token, hosts=hosts, read_only=read_only)
        serving.server_of(made).run(sockets=[sock])


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
