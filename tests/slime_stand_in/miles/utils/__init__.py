"""Stands for miles where its source is not there: names and signatures are compared with it."""
