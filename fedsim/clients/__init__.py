"""fedsim.clients"""
