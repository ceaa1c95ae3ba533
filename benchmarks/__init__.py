"""What maintainers measure with: from a checkout, `switchyard bench` has these kinds too."""
