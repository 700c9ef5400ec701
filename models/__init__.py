"""The bundled toy models and the scripts that generate their data, train them and measure them."""
