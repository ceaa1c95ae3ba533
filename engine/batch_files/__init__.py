"""Files of rows: a batch's input, the journal of what was answered, and the result file; no torch."""
