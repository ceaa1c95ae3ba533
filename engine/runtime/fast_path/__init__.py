"""Native steps for one token, or a few, through the parts of decoder layers, one file per kind of part."""
