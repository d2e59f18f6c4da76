"""fedsim.cli"""
