"""Jobs of many rows, whoever answers them: from the input to those that answer, and from there to the journal."""
