"""Ctrl-C ends a query that would run for ever, and the session works on."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import polars as pl  # noqa: F401 - its signal handlers let a wait go on that Python's would end
import pytest

from storage_engine import Session
from tests.runtime.support import make_storage
from tests.shop import Customer

ENDLESS = {
    "counting": "select count(*) from Customer a, Customer b, Customer c, Customer d "
    "where a.age + b.age > c.age + d.age",
    "sorting": "select a.id from Customer a, Customer b, Customer c, Customer d "
    "order by a.age + b.age * c.age - d.age",
}


@pytest.mark.parametrize("engine", ["sqlite-v2", "object-v2"])
@pytest.mark.parametrize("what", ENDLESS)
def test_ctrl_c_ends_a_query(tmp_path: Path, engine: str, what: str) -> None:
    with Session(make_storage(tmp_path, engine)) as session:
        session.ensure([Customer(id=f"{n:05}", name="x", age=n) for n in range(3_000)])
        session.commit()
        timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                session.sql(ENDLESS[what]).collect()
        finally:
            timer.cancel()
        assert session.query().entities(Customer).count() == 3_000
