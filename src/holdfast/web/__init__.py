"""The viewer: `holdfast serve` runs it, `served(store)` serves it in a thread of a program, and
`app(store)` is an ASGI app to mount in another one.

It needs the extra `web`: pip install 'holdfast[web]'.
"""

from holdfast.web.server import LOOPBACK, app, served

__all__ = ["LOOPBACK", "app", "served"]
