"""Example scripts of libraries, followed through their whole job."""
