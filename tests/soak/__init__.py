"""What is held in a long run: `python -m tests.soak`, and a short part among the tests."""
