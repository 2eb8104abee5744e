"""`holdfast serve`: the viewer in a browser."""

from __future__ import annotations

import ipaddress

import click

from holdfast.cli.context import App, command, require_extra
from holdfast.errors import InvalidRequest


@command("serve")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=7460, show_default=True,
    help="The port; 0 means any free one.",
)  # fmt: skip
@click.option("--read-only", is_flag=True, help="Do not allow changes.")
@click.option(
    "--auth-token", metavar="TOKEN", envvar="HOLDFAST_AUTH_TOKEN", show_envvar=True,
    help="The token that each request needs. Without it, a new one is made.",
)  # fmt: skip
@click.option(
    "--allow-host", metavar="NAME", multiple=True,
    help="Another name of this machine that browsers may use (may be repeated).",
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
    """Look at the store in a browser: sessions, timelines, changes and costs.

    Only this machine can reach it, and only with the address that is printed. To let other machines
    reach it, give --host and --auth-token.
    """
    with require_extra("web"):
        from holdfast.web import LOOPBACK, server
        from holdfast.web import app as viewer
    if not _is_loopback(host) and not auth_token:
        raise InvalidRequest(f"other machines can reach {host}", hint="give an --auth-token")
    if auth_token is not None and len(auth_token) < 16:
        raise InvalidRequest("an --auth-token needs at least 16 characters")
    from secrets import token_urlsafe
    from urllib.parse import quote

    token = auth_token or token_urlsafe(24)
    with app.store(write=not read_only) as store, server.listen(host, port) as sock:
        name = f"[{host}]" if ":" in host else host
        address = f"http://{name}:{sock.getsockname()[1]}/"
        url = f"{address}?token={quote(token, safe='')}"
        if app.json:
            app.print_json({"url": url, "read_only": read_only})
        else:
            app.print(url)
            app.notice("Anyone with this address has access. Press Ctrl-C to stop.")
        if show:
            click.launch(url)
        hosts = (*LOOPBACK, host, *allow_host)
        made = viewer(store, token=token, hosts=hosts, read_only=read_only)
        server.server_of(made).run(sockets=[sock])


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
