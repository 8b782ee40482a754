"""How parameters change: learning rate, optimizer, which parameter gets what, router bias."""
