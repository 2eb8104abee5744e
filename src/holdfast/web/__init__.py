"""The viewer: `holdfast serve`, or `holdfast.web.app(store)` within an ASGI app of your own.

Needs the extra `web`: pip install 'holdfast[web]'.
"""

from holdfast.web.application import LOOPBACK, app

__all__ = ["LOOPBACK", "app"]
