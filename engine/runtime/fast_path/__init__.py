"""Native steps for single tokens through the parts of decoder layers, one file per kind of part."""
