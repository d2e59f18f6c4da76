"""fedsim.audit"""
