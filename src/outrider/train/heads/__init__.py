"""The networks that can be trained as drafters, and the layers they share."""
