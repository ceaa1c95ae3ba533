"""Files of rows: a batch's input, the journal of answers, and the result file; no torch."""
