"""The five papers: which runs fill their figures and tables, measurements on finished runs, claims, verdicts and pictures.

It builds on the library, which never imports it: what trains, sweeps, counts and quantizes works without this package.
"""
