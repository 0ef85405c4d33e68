"""The training loop and the tasks that it runs."""
