"""What did we see: pictures drawn from finished runs."""
