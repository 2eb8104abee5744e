"""The viewer: `holdfast serve`; `served(store)` in a thread of a program; or `app(store)`, to be
mounted in an ASGI app of your own.

Needs the extra `web`: pip install 'holdfast[web]'.
"""

from holdfast.web.application import LOOPBACK, app
from holdfast.web.serving import served

__all__ = ["LOOPBACK", "app", "served"]
