"""What a decoded token used: experts by how they were met, and energy."""
