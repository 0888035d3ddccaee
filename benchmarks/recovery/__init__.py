"""What a killed rank costs: ``python -m benchmarks.recovery``; its programs are in files of their framework."""
