"""fedsim.datasets"""
