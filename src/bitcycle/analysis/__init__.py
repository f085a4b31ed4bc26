"""What did we learn: results gathered from finished runs."""
