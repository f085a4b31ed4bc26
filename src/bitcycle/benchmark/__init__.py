"""How fast is it: training steps, quantizers, data and runs at a time, on this machine (`make bench`)."""
