"""The API for asyncio: aopen(), AsyncStore, AsyncSession and AsyncRun.

Workers and Lane run other code in worker threads, for adapters that open a store of their own.
"""

from holdfast.aio.workers import Lane, Workers

__all__ = ["Lane", "Workers"]
