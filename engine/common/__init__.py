"""What every other part may use: it knows neither torch nor any of them."""
