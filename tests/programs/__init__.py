"""Other people's models, trainers and rules with a converted model: `make programs`.

The packages are in the extra `programs`. pytest collects nothing here.
"""
