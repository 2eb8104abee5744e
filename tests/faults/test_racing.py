"""Eight processes at once."""

from holdfast.storage.sqlite import schema, writer

from . import racing


def test_on_one_session_exactly_one_wins_each_step(rounds):
    report = racing.race(racing.fair, saves=rounds(25, torture=500))
    print(report)
    assert report.conflicts
    assert not report.failures, str(report)


def test_on_their_own_sessions_nobody_is_locked_out(rounds, tmp_path):
    """On a real disk: waiting for it is what makes writers meet."""
    report = racing.race(racing.alone, saves=rounds(100, torture=5000), folder=tmp_path)
    print(report)
    assert report.saved == 8 * rounds(100, torture=5000)
    assert not report.failures, str(report)


def test_mutant_that_does_not_wait(tmp_path):
    report = racing.race(racing.alone, saves=100, sabotage=impatient, folder=tmp_path)
    print(report)
    assert any("is locked by" in found for found in report.failures)


def impatient():
    """Gives up where another writes."""
    schema._patience = lambda timeout: lambda count: False


def test_mutant_that_saves_an_old_state_over_a_new_head():
    report = racing.race(racing.stubborn)
    print(report)
    assert any("lost update: " in found for found in report.failures)


def test_mutant_that_does_not_compare_heads():
    report = racing.race(racing.fair, sabotage=no_compare_and_swap)
    print(report)
    # A second line of defence: two saves from one head want the same row.
    caught = ("exists already", "lost: ", "lost update: ")
    assert any(reason in found for reason in caught for found in report.failures)


def no_compare_and_swap():
    write = writer.write

    def blindly(connection, cursor, batch):
        if batch.swap is not None:
            query = "SELECT body FROM heads WHERE session = ?"
            (head,) = connection.execute(query, (batch.swap.session,)).fetchone()
            batch.swap = batch.swap._replace(expect=head)
        write(connection, cursor, batch)

    writer.write = blindly
