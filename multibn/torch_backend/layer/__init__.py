"""The layers, and the function and autograd node behind them."""
