"""fedsim.models"""
