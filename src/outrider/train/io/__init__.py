"""Files of a training run: state, card, and exports of trained heads."""
