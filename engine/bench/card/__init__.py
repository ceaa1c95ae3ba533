"""Ten minutes on a machine with a graphics card: what a contributor with a card is asked to run."""
